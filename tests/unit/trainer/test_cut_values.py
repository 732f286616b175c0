"""The critic's values where responses were cut against the returns that came later, with hand values and with a critic of known error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.rollouts import make_config, make_rows
from vapo_mcore.config import Config
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.horizon_metrics import Cut, cuts_that_ended, record_cut_weight, record_cuts, values_at_cuts

GAMMA = 0.9


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def configured(truncation: str = "terminal") -> Config:
    return make_config(rollout={"horizon": {"tokens": 2, "train": "segments"}}, advantage={"gamma": GAMMA, "truncation": truncation})


def row_of(cuts: list[Cut], interval: tuple[float, float] = (0.0, 1.0)) -> dict[str, Any]:
    metrics = StepMetrics(METRICS)
    record_cuts(metrics, cuts, interval)
    return metrics.reduce(None)


def test_returns_are_the_discounted_rewards_after_the_cut() -> None:
    """Prompts of 2 tokens; a step reward before the first cut, one on the token right after it, one later."""
    rows = make_rows([6, 5, 4, 3], [1.0, 0.0, 1.0, 1.0], graded=[True, True, True, False], steps={0: [(1, 9.0), (2, 0.5), (4, 0.25)]})
    rows = replace(rows, finish_reason=["stop", "stop", "length", "stop"])
    values = ((0, 2, 0.6), (0, 4, 0.7), (1, 2, 0.5), (2, 2, 0.4), (3, 2, 0.3))
    found = cuts_that_ended(configured(), rows, values)
    assert [(cut.row, cut.value) for cut in found] == [(0, 0.6), (0, 0.7), (1, 0.5), (2, 0.4)]  # without a verdict: none
    first, second = 0.5 + 0.25 * GAMMA**2 + GAMMA**3, 0.25 + GAMMA
    assert [cut.outcome for cut in found] == pytest.approx([first, second, 0.0, GAMMA])
    assert [cut.row for cut in cuts_that_ended(configured("bootstrap"), rows, values)] == [0, 0, 1]


def test_observations_take_no_time() -> None:
    """The returns are those of the same sampled tokens without the environment's: 3 after the second one, where a cut is, and 2 after the
    fourth."""
    rows = make_rows([6], [1.0], steps={0: [(1, 9.0), (2, 0.5), (4, 0.25)]})
    turns = replace(
        rows,
        tool_length=torch.tensor([5]),
        observations=[((2, 3), (4, 2))],
        step_rewards=[((3, 9.0), (7, 0.5), (11, 0.25))],
    )
    values = ((0, 2, 0.6), (0, 3, 0.5), (0, 4, 0.7))
    expected = cuts_that_ended(configured(), rows, values)
    assert cuts_that_ended(configured(), turns, values) == expected
    assert expected[0].outcome == pytest.approx(0.5 + 0.25 * GAMMA**2 + GAMMA**3)


def test_bias_its_error_and_the_bins() -> None:
    row = row_of([Cut(0, 0.5, 1.0), Cut(0, 0.9, 1.0), Cut(1, 0.55, 0.0), Cut(2, 1.3, 1.0)])
    errors = [-0.5, -0.1, 0.55, 0.3]
    bias = sum(errors) / 4
    assert row["horizon/cuts_ended"] == 4
    assert row["horizon/cut_value_bias"] == pytest.approx(bias)
    sums = [errors[0] + errors[1] - 2 * bias, errors[2] - bias, errors[3] - bias]  # by response
    assert row["horizon/cut_value_bias_se"] == pytest.approx(math.sqrt(sum(x * x for x in sums)) / 4)
    assert row["critic/tokens_by_cut"] == [0] * 5 + [2, 0, 0, 0, 2]  # a value above the interval is in the last bin
    assert row["critic/values_by_cut"][5] == pytest.approx(0.525)
    assert row["critic/returns_by_cut"][5] == pytest.approx(0.5)
    assert row["critic/values_by_cut"][9] == pytest.approx(1.1)
    assert row["horizon/cut_value_error"] == pytest.approx((2 * 0.025 + 2 * 0.1) / 4)
    empty = row_of([])
    assert (empty["horizon/cuts_ended"], empty["horizon/cut_value_bias"], empty["horizon/cut_value_error"]) == (0, None, None)
    assert row_of([Cut(0, 0.5, 1.0), Cut(0, 0.6, 1.0)])["horizon/cut_value_bias_se"] is None  # one response tells no spread


@pytest.mark.parametrize("delta", [0.0, 0.2])
def test_the_bias_of_a_critic_that_is_off_is_found_within_four_standard_errors(delta: float) -> None:
    """Responses that end right with a known probability, seen at 1 to 5 cuts: their returns are equal, so cuts are no independent draws."""
    random = np.random.default_rng(3)
    cuts, spread = [], []
    for response in range(4000):
        chance = random.uniform(0.1, 0.7)
        outcome = float(random.random() < chance)
        cuts += [Cut(response, chance + delta, outcome) for _ in range(int(random.integers(1, 6)))]
    row = row_of(cuts)
    assert abs(row["horizon/cut_value_bias"] - delta) < 4 * row["horizon/cut_value_bias_se"]
    # The error is the spread over repetitions of the whole experiment, not that of independent cuts, which is about half of it.
    for seed in range(200):
        random = np.random.default_rng(100 + seed)
        chances, sizes = random.uniform(0.1, 0.7, 400), random.integers(1, 6, 400)
        gaps = chances - (random.random(400) < chances)
        spread.append(float((gaps * sizes).sum() / sizes.sum()))
    assert row["horizon/cut_value_bias_se"] * math.sqrt(10) == pytest.approx(float(np.std(spread)), rel=0.2)


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_the_weight_is_the_change_of_the_mean_advantage_per_unit_of_the_value_at_cuts(lam: float, gamma: float) -> None:
    from vapo_mcore.algorithm.advantages import packed_gae

    lengths = [3, 5, 1, 4]
    cut = torch.tensor([True, False, True, True])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    nothing = torch.zeros(sum(lengths), dtype=torch.float64)
    of_one = packed_gae(nothing, nothing, torch.ones_like(nothing).bool(), bounds, lam, gamma, cut.double())[0]
    experience: Any = SimpleNamespace(trained_lengths=torch.tensor(lengths), rows=SimpleNamespace(cut=cut))
    metrics = StepMetrics(METRICS)
    record_cut_weight(metrics, experience, torch.full((4,), lam, dtype=torch.float64), gamma)
    assert metrics.reduce(None)["horizon/cut_weight"] == pytest.approx(float(of_one.mean()), abs=1e-12)


def test_values_are_those_of_the_responses_that_were_cut() -> None:
    rows = replace(make_rows([2, 2, 2], [1.0, 0.0, 0.0]), finish_reason=["stop", "cut", "cut"])
    batch: Any = SimpleNamespace(row_ids=torch.tensor([2, 0, 1]))
    experience: Any = SimpleNamespace(rows=rows, batch=batch, cu_seqlens=torch.zeros(1), bootstrap_values=torch.tensor([0.25, 9.0, -0.5]))
    names = list(zip(rows.prompt_id, rows.sample_index.tolist(), strict=True))
    assert values_at_cuts(experience, None) == {names[1]: -0.5, names[2]: 0.25}
    experience.rows = replace(rows, finish_reason=["stop"] * 3)
    assert values_at_cuts(experience, None) == {}
