"""Choices of experts on their way: packed, split over ranks, put together again, packed anew; and what is counted of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.trainer.rollouts import make_batch, make_rows
from vapo_mcore.algorithm.weights import Denominators
from vapo_mcore.config.architecture import choice_bytes
from vapo_mcore.data.microbatch import make_microbatch
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.experience.batches import Experience, MiniBatch
from vapo_mcore.megatron.routing import RouterCoefs, RoutingStatistics, expert_load, local_choices
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.step_metrics import record_routing


def choices_of(tokens: int, experts: int, dtype: torch.dtype = torch.uint8, layers: int = 3, topk: int = 2) -> Tensor:
    """Different experts for each token and layer."""
    scores = torch.rand(tokens, layers, experts, generator=torch.Generator().manual_seed(tokens))
    return scores.topk(topk, dim=-1).indices.to(dtype)


@given(
    lengths=st.lists(st.integers(1, 17), max_size=5),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    experts=st.sampled_from([(4, torch.uint8), (256, torch.uint8), (300, torch.int16)]),
)
def test_split_choices_are_those_of_the_tokens_and_pads_reach_different_experts(
    lengths: list[int], cp: int, tp: int, experts: tuple[int, torch.dtype]
) -> None:
    number, dtype = experts
    packed = choices_of(sum(lengths), number, dtype)
    layouts = [
        ThdLayout(lengths, context_parallel_size=cp, context_parallel_rank=rank, tensor_parallel_size=tp).with_padding(8 * tp * cp * 25)
        for rank in range(cp)
    ]
    parts = [local_choices(packed, layout, number) for layout in layouts]
    assert all(part.dtype == dtype for part in parts)
    assert torch.equal(layouts[0].unshard(torch.cat(parts)), packed)
    for part in parts:
        ordered = part.long().sort(-1).values
        assert bool((ordered[..., 1:] > ordered[..., :-1]).all()), "a token reaches topk different experts"
        assert 0 <= int(part.min()) <= int(part.max()) < number
    pads = torch.cat([part[~layout.local_token_mask, 0] for part, layout in zip(parts, layouts, strict=True)])
    if number == 4:  # pads are spread: no expert takes more than an even share of a rank's pads and one for each change between runs
        assert int(expert_load(pads[:, None], 4).max()) <= pads.numel() / 4 + 2 * cp * (len(lengths) + 1)


def test_every_expert_of_a_model_has_a_number() -> None:
    assert (choice_bytes(256), choice_bytes(257)) == (1, 2)
    assert torch.iinfo(torch.uint8).max == 255
    assert torch.iinfo(torch.int16).max >= 300


def test_load_counts_tokens_by_layer_and_expert() -> None:
    choices = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [3, 2]], [[0, 3], [2, 0]]], dtype=torch.uint8)
    assert expert_load(choices, 4).tolist() == [[3, 1, 1, 1], [1, 0, 3, 2]]
    assert expert_load(choices[:0], 4).tolist() == [[0] * 4] * 2


def test_another_plan_of_micro_batches_packs_the_same_choices() -> None:
    """Stored by one plan, with an empty micro-batch, and read by another: every row keeps its own."""
    lengths = [3, 1, 4, 2]
    by_row = [choices_of(length, 8) + 8 * row for row, length in enumerate(lengths)]  # the numbers tell the row
    rows = make_rows([length - 1 for length in lengths], [1.0] * 4, prompt_length=1)
    batch = make_batch(rows)
    first = [make_microbatch(batch, chosen, names=()) for chosen in ([2, 0], [], [3, 1])]
    experience = Experience(rows, rows.graded, batch, batch.cu_seqlens, [MiniBatch(Denominators(10, 4, 0), first)])
    experience.store("choices", [torch.cat([by_row[row] for row in part.rows.tolist()] or [by_row[0][:0]]) for part in first])
    assert batch["choices"].dtype == torch.uint8
    for chosen in ([1, 2], [0], [3, 0, 1], []):
        found = experience.with_tensors(make_microbatch(batch, chosen, names=()), ["choices"]).tensors["choices"]
        assert torch.equal(found, torch.cat([by_row[row] for row in chosen] or [by_row[0][:0]]))
    batch.drop("choices")
    batch.drop("choices")
    assert "choices" not in batch


def test_metrics_of_the_load_by_hand() -> None:
    """Two layers of four experts, two a token, ten tokens, two updates."""
    load = torch.tensor([[10.0, 10.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    metrics = StepMetrics(METRICS)
    found = RoutingStatistics(load, tokens=10.0, changed=3.0, balance=6.0, z=8.0)
    record_routing(metrics, "policy", found, RouterCoefs(balance=0.1, z=0.0), 2, replayed=True)
    assert metrics.reduce(None) == {
        "policy/experts_busiest_max": 1.0,
        "policy/experts_busiest_mean": 0.75,
        "policy/experts_entropy_min": pytest.approx(0.5),  # log 2 / log 4
        "policy/experts_entropy_mean": pytest.approx(0.75),
        "policy/experts_replayed_frac": 0.15,
        "policy/balance_loss": 3.0,
    }
    nothing = StepMetrics(METRICS)
    record_routing(nothing, "critic", RoutingStatistics(load * 0, 0.0, 0.0, 0.0, 0.0), RouterCoefs(), 0, replayed=False)
    assert nothing.reduce(None) == {}
    record_routing(nothing, "critic", found, RouterCoefs(z=0.1), 2, replayed=False)
    assert set(nothing.reduce(None)) == {
        *(
            f"critic/experts_{what}_{how}"
            for what, how in (("busiest", "max"), ("busiest", "mean"), ("entropy", "min"), ("entropy", "mean"))
        ),
        "critic/router_z_loss",
    }
