"""Mini-batches, data-parallel balance and the hard token cap."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema.run import minibatch_count
from vapo_mcore.data.packing import Schedule, attention_cost_ratio, schedule
from vapo_mcore.errors import DataError

CAP = 32768
RATIO_32B = 1 / (12 * 5120)


def check_invariants(result: Schedule, lengths: np.ndarray, minibatch_size: int, dp_size: int, cap: int, **rules: int) -> None:
    """What holds for every schedule, recounted with plain Python from the row numbers."""
    pad, total_multiple = rules.get("pad_multiple", 1), rules.get("total_multiple", 1)
    multiple, least = rules.get("microbatch_multiple", 1), rules.get("min_microbatches", 1)
    seen: list[int] = []
    ratio = len(lengths) / minibatch_size
    assert abs(len(result.minibatches) - max(ratio, 1)) <= 0.5
    for number, minibatch in enumerate(result.minibatches):
        assert len(minibatch.microbatches) == dp_size
        counts = {len(rank) for rank in minibatch.microbatches}
        assert counts == {minibatch.num_microbatches}
        assert minibatch.num_microbatches % multiple == 0
        assert minibatch.num_microbatches >= least
        for rank, microbatches in enumerate(minibatch.microbatches):
            for rows in microbatches:
                padded = sum(math.ceil(lengths[row] / pad) * pad for row in rows)
                assert math.ceil(padded / total_multiple) * total_multiple <= cap
                assert all(result.owner[row] == rank for row in rows)
        size = len(minibatch.rows)
        share, rest = divmod(len(lengths), len(result.minibatches))
        assert size == share + (number < rest)
        seen += minibatch.rows
    assert sorted(seen) == list(range(len(lengths)))


def imbalances(result: Schedule, of: np.ndarray) -> float:
    """max / mean over the ranks, worst mini-batch."""
    worst = 1.0
    for minibatch in result.minibatches:
        loads = [sum(float(of[row]) for rows in rank for row in rows) for rank in minibatch.microbatches]
        worst = max(worst, max(loads) * len(loads) / sum(loads))
    return worst


@pytest.mark.parametrize("trials", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_heavy_tailed_batches_keep_every_rule(trials: int) -> None:
    generator = np.random.default_rng(20250801)
    for trial in range(trials):
        rows = int(generator.integers(1, 30))
        cap = int(generator.choice([64, 1000, 4096]))
        drawn = generator.lognormal(3, 1.5, rows) if trial % 2 else generator.pareto(0.8, rows) * 8
        cp_multiple, tp = [(1, 1), (1, 2), (4, 4), (8, 16)][trial % 4]
        largest = cap // tp * tp // cp_multiple * cp_multiple
        lengths = np.clip(drawn.astype(np.int64) + 1, 1, largest)
        dp_size, minibatch_size = int(generator.integers(1, 6)), int(generator.integers(rows // 3 + 1, rows + 4))
        rules = {"pad_multiple": cp_multiple, "total_multiple": tp, "microbatch_multiple": 1 + trial % 3, "min_microbatches": trial % 5}
        result = schedule(lengths, minibatch_size, dp_size, cap, seed=trial, attention_cost_ratio=1e-4 * (trial % 3), **rules)
        check_invariants(result, lengths, minibatch_size, dp_size, cap, **rules)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    minibatch_size=st.integers(1, 32),
    dp_size=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    multiple=st.integers(1, 4),
)
def test_any_batch_keeps_every_rule(lengths: list[int], minibatch_size: int, dp_size: int, seed: int, multiple: int) -> None:
    result = schedule(lengths, minibatch_size, dp_size, 100, seed=seed, microbatch_multiple=multiple)
    check_invariants(result, np.array(lengths), minibatch_size, dp_size, 100, microbatch_multiple=multiple)


@pytest.mark.parametrize("lengths_seed", [0, 1, 2])
def test_fill_and_balance_of_a_large_rollout(lengths_seed: int) -> None:
    generator = np.random.default_rng(lengths_seed)
    lengths = np.clip(generator.lognormal(np.log(4096) - 0.5, 1.0, 8192).astype(np.int64) + 1, 1, CAP)
    cost = lengths + RATIO_32B * lengths.astype(float) ** 2
    schedule(lengths[:512], 256, 16, CAP, seed=0, attention_cost_ratio=RATIO_32B)  # compiles
    for minibatch_size, dp_size in ((8192, 1), (8192, 16), (512, 16)):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            result = schedule(lengths, minibatch_size, dp_size, CAP, seed=7, attention_cost_ratio=RATIO_32B)
            times.append(time.perf_counter() - start)
        check_invariants(result, lengths, minibatch_size, dp_size, CAP)
        used = sum(bool(rows) for m in result.minibatches for rank in m.microbatches for rows in rank)
        if minibatch_size == 8192:  # a rank's share of 512 rows is only about 4 caps long, so that rounding up rules there
            assert lengths.sum() / (used * CAP) >= 0.99
        assert imbalances(result, lengths) <= 1.01
        assert imbalances(result, cost) <= 1.01
        # The target of 0.15 s is measured by benchmarks/packing.py; a test only guards against another order of magnitude.
        assert min(times) <= 1.0


def test_same_seed_same_schedule_and_another_seed_another() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 300)
    first, second, third = (schedule(lengths, 64, 4, 1000, seed=seed) for seed in (5, 5, 6))
    assert first.minibatches == second.minibatches
    assert torch.equal(first.owner, second.owner)
    assert [sorted(m.rows) for m in first.minibatches] != [sorted(m.rows) for m in third.minibatches]


def test_lists_tensors_and_arrays_give_the_same_schedule() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    results = [schedule(x, 4, 2, 10, seed=0).minibatches for x in (lengths, torch.tensor(lengths), np.array(lengths))]
    assert results[0] == results[1] == results[2]


def test_minibatches_mix_groups_and_spread_a_remainder() -> None:
    result = schedule([1] * 10, 4, 2, 8, seed=0)
    assert [len(m.rows) for m in result.minibatches] == [4, 3, 3]
    assert sorted(row for m in result.minibatches for row in m.rows) == list(range(10))
    assert sorted(result.minibatches[0].rows) != [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "size", "sizes"),
    [
        (7681, 512, [513] + [512] * 14),
        (7679, 512, [512] * 14 + [511]),
        (8192, 512, [512] * 16),
        (3, 512, [3]),
        (768, 512, [384] * 2),
        (0, 4, []),
    ],
)
def test_no_optimizer_step_is_made_on_a_few_rows_left_over(rows: int, size: int, sizes: list[int]) -> None:
    result = schedule([1] * rows, size, 1, 10_000, seed=0)
    assert [len(m.rows) for m in result.minibatches] == sizes
    assert minibatch_count(rows, size) == len(sizes)


def test_fewer_rows_than_ranks_gives_empty_microbatches() -> None:
    result = schedule([5, 7], 2, 4, 10, seed=0, min_microbatches=2)
    minibatch = result.minibatches[0]
    assert sorted(len(rows) for rank in minibatch.microbatches for rows in rank) == [0, 0, 0, 0, 0, 0, 1, 1]
    assert minibatch.num_microbatches == 2


def test_microbatches_the_pipeline_demands_are_used() -> None:
    # 8 rows of 10 fit into one micro-batch of 80; a pipeline of 4 gets 4 even ones rather than 1 full and 3 empty.
    result = schedule([10] * 8, 8, 1, 80, seed=0, min_microbatches=4)
    assert [len(rows) for rows in result.minibatches[0].microbatches[0]] == [2, 2, 2, 2]


def test_rows_left_out_have_no_owner() -> None:
    result = schedule([4, 4, 4, 4, 4], 2, 2, 10, seed=0, rows=[0, 2, 4])
    assert sorted(row for m in result.minibatches for row in m.rows) == [0, 2, 4]
    assert (result.owner >= 0).tolist() == [True, False, True, False, True]


def test_nothing_to_train_on_gives_no_minibatch() -> None:
    result = schedule([4, 4], 2, 2, 10, seed=0, rows=[])
    assert result.minibatches == []
    assert result.owner.tolist() == [-1, -1]


def test_row_longer_than_the_cap_is_named_with_its_length() -> None:
    with pytest.raises(DataError, match=r"2 of 4 rows are longer .* 100: row 1: 101 tokens, row 3: 5000 tokens; .* at least 5000"):
        schedule([100, 101, 7, 5000], 4, 2, 100, seed=0)


def test_padding_counts_against_the_cap() -> None:
    schedule([96], 1, 1, 100, seed=0, pad_multiple=16, total_multiple=32)
    with pytest.raises(DataError, match=r"100 \(96 after rounding down to the pad multiple\): row 0: 97 tokens"):
        schedule([97], 1, 1, 100, seed=0, pad_multiple=16, total_multiple=32)


def test_longest_rows_do_not_meet_on_one_rank() -> None:
    # One row of 100 costs as much as ten of 10 in tokens, but more with attention: it must get fewer companions then.
    lengths = [100] + [10] * 30
    with_attention = schedule(lengths, 31, 2, 1000, seed=0, attention_cost_ratio=0.05)
    long_rank = int(with_attention.owner[0])
    companions = int((with_attention.owner == long_rank).sum()) - 1
    # Costs: 600 for the long row, 15 for a short one, total 1050; an even split is impossible (600 > 525), so it stays alone.
    assert companions == 0
    without = schedule(lengths, 31, 2, 1000, seed=0)
    # Tokens: 400 in all, 200 a rank, so the long row is joined by 10 of the 30 short ones.
    assert int((without.owner == int(without.owner[0])).sum()) - 1 == 10


def test_attention_cost_ratio_counts_the_weights_of_the_model() -> None:
    architecture = ModelArchitecture(
        family="qwen2",
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=2,
        vocab_size=10,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=True,
        attention_output_bias=False,
        qk_norm=False,
    )
    # A layer: q 8x8, k and v 8x4 each, output 8x8, three 8x16 matrices of the MLP = 576; two layers and 8x10 for the output
    # layer = 1232. Attention a token and a token of length: 2 layers x 8 (scores and sum, half of each under the causal mask).
    assert attention_cost_ratio(architecture) == pytest.approx(16 / 1232)
