"""Clip-Cov and KL-Cov against loops over all tokens in float64, whole and split over ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vapo_mcore.algorithm import covariance
from vapo_mcore.algorithm.covariance import (
    chosen_count,
    covariance_terms,
    largest,
    random_scores,
    token_covariances,
    token_keys,
)

TOKENS = 40


def problem() -> dict[str, Tensor]:
    """Tokens of five rows of eight; NaN at masked ones; log-probs of several tokens of one advantage are equal, as they are near 0."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(TOKENS, generator=generator) > 0.2
    old = -2 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    old[::3] = 0.0
    new = old + 0.3 * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.5, -0.5, 1.5, -1.0, 0.2], dtype=torch.float64).repeat_interleave(8)
    rows = torch.tensor([4, 0, 3, 1, 2]).repeat_interleave(8)
    keys = token_keys(rows, torch.arange(8).repeat(5))
    nan = torch.nan
    return {"old": old.where(mask, nan), "new": new.where(mask, nan), "advantages": advantages.where(mask, nan), "mask": mask, "keys": keys}


def by_hand(p: dict[str, Tensor], count: int) -> set[int]:
    """Keys of the tokens of largest covariance (Eq. 10), of equal ones the first in the order of rows."""
    inside = [t for t in range(TOKENS) if p["mask"][t]]
    mean_old = sum(float(p["old"][t]) for t in inside) / len(inside)
    mean_advantage = sum(float(p["advantages"][t]) for t in inside) / len(inside)
    found = {t: (float(p["old"][t]) - mean_old) * (float(p["advantages"][t]) - mean_advantage) for t in inside}
    got = token_covariances(p["old"], p["advantages"], p["mask"])
    for t in range(TOKENS):
        assert float(got[t]) == pytest.approx(found.get(t, 0.0), abs=1e-12)
    return {int(p["keys"][t]) for t in sorted(inside, key=lambda t: (-round(found[t], 12), int(p["keys"][t])))[:count]}


def on_ranks(world: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` of every rank, whose collectives meet; the real process groups are in tests/distributed/test_algorithm.py."""
    barrier, shared, own = threading.Barrier(world), [torch.empty(0)] * world, threading.local()

    def meet(x: Tensor) -> list[Tensor]:
        shared[own.rank] = x.clone()
        barrier.wait(timeout=30)
        everyone = [part.clone() for part in shared]
        barrier.wait(timeout=30)
        return everyone

    def all_reduce(x: Tensor, op: Any, group: Any) -> None:
        x.copy_(torch.stack(meet(x)).amax(0))

    def all_gather(out: list[Tensor], x: Tensor, group: Any) -> None:
        out[:] = meet(x)

    operations = SimpleNamespace(MAX=0)
    fake = SimpleNamespace(get_world_size=lambda group: world, all_reduce=all_reduce, all_gather=all_gather, ReduceOp=operations)
    monkeypatch.setattr(covariance, "dist", fake)

    def of_rank(rank: int) -> Any:
        own.rank = rank
        return work(rank)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(of_rank, range(world)))


@pytest.mark.parametrize("count", [1, 4, 11, 400])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[2, 4], [0], [3, 1], []]])
def test_the_tokens_of_largest_covariance_are_chosen_in_any_split(
    count: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem()
    expected = by_hand(p, count)
    scores = token_covariances(p["old"], p["advantages"], p["mask"])

    def work(rank: int) -> set[int]:
        index = torch.tensor([8 * row + t for row in parts[rank] for t in range(8)], dtype=torch.int64)
        chosen = largest(scores[index], p["mask"][index], p["keys"][index], count, object())  # type: ignore[arg-type]
        assert not (chosen & ~p["mask"][index]).any()
        return set(p["keys"][index][chosen].tolist())

    found = on_ranks(len(parts), monkeypatch, work)
    assert set.union(*found) == expected
    assert len(expected) == min(count, int(p["mask"].sum()))


def test_tokens_with_equal_covariance_are_among_the_chosen_and_the_left() -> None:
    """Else the order by key would decide nothing above."""
    p = problem()
    scores = token_covariances(p["old"], p["advantages"], p["mask"])
    chosen = largest(scores, p["mask"], p["keys"], 4)
    assert set(scores[chosen].tolist()) & set(scores[p["mask"] & ~chosen].tolist())


def test_random_scores_are_uniform_and_of_key_and_seed() -> None:
    keys = token_keys(torch.arange(200).repeat_interleave(50), torch.arange(50).repeat(200))
    assert keys.unique().numel() == keys.numel()
    first, second = random_scores(keys, 1), random_scores(keys, 2)
    shuffled = torch.randperm(keys.numel(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(random_scores(keys[shuffled], 1), first[shuffled])
    for scores in (first, second):
        assert float(scores.min()) >= 0 and float(scores.max()) < 1
        counts = torch.histc(scores, 10, 0.0, 1.0)
        assert float(((counts - 1000.0).square() / 1000.0).sum()) < 27.9  # chi-square, 9 degrees of freedom: 0.1 %
        assert abs(float(torch.corrcoef(torch.stack([scores[1:], scores[:-1]]))[0, 1])) < 0.04
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.04


def test_a_choice_has_at_least_one_token() -> None:
    assert [chosen_count(2e-4, tokens) for tokens in (1, 4999, 10000, 14999, 15000)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("kl_coef", [None, 0.7])
def test_terms_are_their_definition(kl_coef: float | None) -> None:
    """Value and gradient of -r A, of 0 (Clip-Cov) and of -r A + coef |log r| (KL-Cov) at the chosen tokens."""
    p = problem()
    mask = p["mask"]
    selected = torch.zeros(TOKENS, dtype=torch.bool)
    selected[4:12] = True
    logprobs = p["new"].clone().requires_grad_()
    terms, indicators = covariance_terms(logprobs, p["old"], p["advantages"], mask, selected, kl_coef=kl_coef)
    terms.sum().backward()
    assert logprobs.grad is not None and (selected & mask).any() and (selected & ~mask).any()
    for t in range(TOKENS):
        value = slope = 0.0
        if mask[t]:
            difference = float(p["new"][t] - p["old"][t])
            ratio, advantage = torch.tensor(difference).double().exp().item(), float(p["advantages"][t])
            value = slope = -ratio * advantage
            if selected[t]:
                sign = (difference > 0) - (difference < 0)
                value, slope = (0.0, 0.0) if kl_coef is None else (value + kl_coef * abs(difference), slope + kl_coef * sign)
        assert float(terms[t]) == pytest.approx(value, abs=1e-6) and float(logprobs.grad[t]) == pytest.approx(slope, abs=1e-6)
    assert not any(indicators[name].any() for name in ("clip_frac_high", "clip_frac_low", "clip_frac_dual"))
    halves = covariance_terms(
        p["new"], p["old"], p["advantages"], mask, selected, kl_coef=kl_coef, importance_weights=torch.full((TOKENS,), 0.5)
    )
    torch.testing.assert_close(halves[0][mask], 0.5 * terms.detach()[mask])
