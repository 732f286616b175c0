"""GSPO and CISPO against their definitions in float64 with autograd, whole and split over micro-batches and parts of sequences."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vapo_mcore.algorithm import objectives
from vapo_mcore.algorithm.objectives import Sequences, cispo_terms, gspo_terms
from vapo_mcore.algorithm.weights import Denominators, token_weights
from vapo_mcore.data.thd import ThdLayout

LENGTHS = (7, 1, 12, 5)
CLIPS = {"clip_low": 0.03, "clip_high": 0.05}


def problem(dtype: torch.dtype, *, prompts: bool = False) -> dict[str, Tensor]:
    """Four responses, the last without an unmasked token, the third with a gap; NaN wherever the mask is off.

    ``prompts``: each begins with a token of a prompt.
    """
    generator = torch.Generator().manual_seed(4)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    total = int(bounds[-1])
    mask = torch.ones(total, dtype=torch.bool)
    mask[0], mask[12:15], mask[20:] = False, False, False
    if prompts:
        mask[bounds[:-1]] = False
    old = -torch.rand(total, generator=generator, dtype=torch.float64)
    new = old + 0.2 * torch.randn(total, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.7, -1.0, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    tensors = {"logprobs": new, "old": old, "advantages": advantages}
    return {name: torch.where(mask, x, math.nan).to(dtype) for name, x in tensors.items()} | {"mask": mask, "bounds": bounds}


def gspo_definition(p: dict[str, Tensor], dual_clip: float | None) -> tuple[Tensor, Tensor]:
    """-(1/n) sum_i min(s_i A_i, clip(s_i) A_i) and its gradient (arXiv:2507.18071, Eqs. 5 and 7)."""
    logprobs = p["logprobs"].clone().requires_grad_()
    objectives = []
    for begin, end in zip(p["bounds"][:-1].tolist(), p["bounds"][1:].tolist(), strict=True):
        inside = [t for t in range(begin, end) if p["mask"][t]]
        if inside:
            ratio = (logprobs[inside] - p["old"][inside]).mean().exp()
            advantage = p["advantages"][inside[0]]
            value = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIPS["clip_low"], 1 + CLIPS["clip_high"]) * advantage)
            if dual_clip is not None and advantage < 0:
                value = torch.maximum(value, dual_clip * advantage)
            objectives.append(value)
    loss = -torch.stack(objectives).mean()
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


def part(p: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    index = torch.cat([torch.arange(int(p["bounds"][row]), int(p["bounds"][row + 1])) for row in rows])
    bounds = torch.tensor([0, *(LENGTHS[row] for row in rows)]).cumsum(0)
    return {name: x[index] for name, x in p.items() if name != "bounds"} | {"bounds": bounds, "index": index}


@pytest.mark.parametrize("dual_clip", [None, 1.05])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[3], [2, 0], [1]]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gspo_is_its_definition_in_any_split(split: list[list[int]], dual_clip: float | None, dtype: torch.dtype) -> None:
    expected, gradient = gspo_definition(problem(torch.float64), dual_clip)
    p = problem(dtype)
    denominators = Denominators.from_mask(p["mask"], p["bounds"])
    total, found = 0.0, torch.zeros(sum(LENGTHS), dtype=dtype)
    for rows in split:
        q = part(p, rows)
        logprobs = q["logprobs"].requires_grad_()
        terms, _ = gspo_terms(logprobs, q["old"], q["advantages"], q["mask"], Sequences(q["bounds"]), **CLIPS, dual_clip=dual_clip)
        loss = (terms * token_weights(q["mask"], q["bounds"], "sequence", None, denominators)).sum()
        loss.backward()
        total += loss.item()
        assert logprobs.grad is not None
        found[q["index"]] = logprobs.grad
    tolerance = 1e-6 if dtype == torch.float32 else 2e-7  # the weights are float32
    assert total == pytest.approx(float(expected), abs=tolerance)
    torch.testing.assert_close(found.double(), gradient.nan_to_num(), rtol=0, atol=tolerance)


def test_gspo_counts_clips_of_sequences() -> None:
    p = problem(torch.float64)
    terms, indicators = gspo_terms(p["logprobs"], p["old"], p["advantages"], p["mask"], Sequences(p["bounds"]), **CLIPS)
    for begin, end in zip(p["bounds"][:-1].tolist(), p["bounds"][1:].tolist(), strict=True):
        inside = p["mask"][begin:end]
        ratios = indicators["ratio"][begin:end][inside]
        assert ratios.numel() == 0 or torch.equal(ratios, ratios[:1].expand_as(ratios))
    high = (indicators["ratio"] > 1.05) & (p["advantages"] > 0)
    assert torch.equal(indicators["clip_frac_high"].bool(), high)
    assert not terms[~p["mask"]].any()


def test_cispo_is_its_definition() -> None:
    """Gradient of -sum w sg(min(r, 1 + high)) A logp, the weight a constant (arXiv:2506.13585, Eqs. 4 and 5)."""
    p = problem(torch.float64)
    mask = p["mask"]
    weights = token_weights(mask, p["bounds"], "token").double()
    ratio = (p["logprobs"] - p["old"])[mask].exp()
    constant = torch.minimum(ratio, torch.tensor(1.1, dtype=torch.float64)) * p["advantages"][mask]
    logprobs = p["logprobs"].clone().requires_grad_()
    terms, indicators = cispo_terms(logprobs, p["old"], p["advantages"], mask, clip_high=0.1)
    loss = (terms * weights).sum()
    loss.backward()
    assert loss.item() == pytest.approx(float(-(constant * p["logprobs"][mask] * weights[mask]).sum()), rel=1e-12)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[mask], -constant * weights[mask], rtol=1e-12, atol=0)
    assert not logprobs.grad[~mask].any()
    clipped: Any = indicators["clip_frac_high"][mask]
    assert 0 < int(clipped.sum()) == int((ratio > 1.1).sum())
    half = cispo_terms(p["logprobs"], p["old"], p["advantages"], mask, clip_high=0.1, importance_weights=torch.full_like(terms, 0.5))[0]
    torch.testing.assert_close(half[mask], 0.5 * terms.detach()[mask])


@pytest.mark.parametrize("cp", [2, 4])
def test_gspo_of_sequences_that_lie_on_several_context_parallel_ranks(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training engine's frames (shifted, padded, split zig-zag), each rank a thread that meets the others in the sum; the real
    process groups are in tests/distributed/test_layouts.py."""
    expected, gradient = gspo_definition(problem(torch.float64, prompts=True), None)
    p = problem(torch.float32, prompts=True)
    weights = token_weights(p["mask"], p["bounds"], "sequence")
    barrier, shared = threading.Barrier(cp), [torch.empty(0)] * cp
    rank_of = threading.local()

    def all_reduce(sums: Tensor, group: Any) -> None:
        shared[rank_of.rank] = sums.clone()
        barrier.wait(timeout=30)
        sums.copy_(torch.stack(shared).sum(0))
        barrier.wait(timeout=30)

    monkeypatch.setattr(objectives, "dist", SimpleNamespace(get_world_size=lambda group: cp, all_reduce=all_reduce))

    def of_rank(rank: int) -> tuple[float, Tensor]:
        rank_of.rank = rank
        layout = ThdLayout(LENGTHS, context_parallel_size=cp, context_parallel_rank=rank)
        inside = {name: p[name] for name in ("logprobs", "old", "advantages", "mask")} | {"weights": weights}
        local = {name: layout.shard(layout.shift_left(x, False if x.dtype == torch.bool else 0), False) for name, x in inside.items()}
        logprobs = local["logprobs"].requires_grad_()
        sequences = Sequences(layout.local_cu_seqlens, group=object())  # type: ignore[arg-type]
        terms, _ = gspo_terms(logprobs, local["old"], local["advantages"], local["mask"], sequences, **CLIPS)
        loss = (terms * local["weights"]).sum()
        loss.backward()
        assert logprobs.grad is not None
        return loss.item(), logprobs.grad

    with ThreadPoolExecutor(cp) as pool:
        parts = list(pool.map(of_rank, range(cp)))
    assert sum(loss for loss, _ in parts) == pytest.approx(float(expected), abs=1e-6)
    layout = ThdLayout(LENGTHS, context_parallel_size=cp)
    found = layout.shift_right(layout.unshard(torch.cat([grad for _, grad in parts])), 0.0)
    torch.testing.assert_close(found.double(), gradient.nan_to_num(), rtol=0, atol=1e-6)
