"""Responses cut at a horizon: advantages of segments against exact values of a tabular MDP, and the decoupled objective in float64.

The MDP: a response of at most 6 tokens; token 2 ends it. The state is (position, last token, number of 1s), the policy depends on all of
it, and the reward comes at the end. All 3^6 token sequences are enumerated, so expectations are exact, not estimated.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest
import torch

from vapo_mcore.algorithm.advantages import packed_gae_decoupled
from vapo_mcore.algorithm.importance import importance_weights
from vapo_mcore.algorithm.lambdas import length_adaptive_lambda
from vapo_mcore.algorithm.losses import policy_loss_terms

State = tuple[int, int, int]
LONGEST, END, GAMMA, ALPHA = 6, 2, 0.9, 0.4
HORIZONS = [1, 2, 3, 4, 5]


def policy(state: State) -> list[float]:
    position, last, ones = state
    weights = [1.0 + 0.3 * ones, 1.2 + 0.5 * (last == 1), 0.2 + 0.15 * position]
    return [weight / sum(weights) for weight in weights]


def follow(state: State, token: int) -> State:
    return state[0] + 1, token, state[2] + (token == 1)


def is_final(state: State) -> bool:
    return state[1] == END or state[0] == LONGEST


def reward(state: State) -> float:
    return 0.0 if not is_final(state) else 1.0 - abs(state[2] - 2) * 0.7 + 0.4 * (state[1] == END)


@cache
def value(state: State) -> float:
    return 0.0 if is_final(state) else math.fsum(p * action_value(state, token) for token, p in enumerate(policy(state)))


def action_value(state: State, token: int) -> float:
    after = follow(state, token)
    return reward(after) + GAMMA * value(after)


@dataclass(frozen=True)
class Path:
    """A complete response: the states before its tokens and after the last one, its tokens, and its probability."""

    states: list[State]
    tokens: list[int]
    probability: float


def paths(states: list[State], tokens: list[int], probability: float) -> list[Path]:
    if is_final(states[-1]):
        return [Path(states, tokens, probability)]
    found = []
    for token, p in enumerate(policy(states[-1])):
        found += paths([*states, follow(states[-1], token)], [*tokens, token], probability * p)
    return found


ALL = paths([(0, 0, 0)], [], 1.0)


Lambda = float | Literal["length_so_far", "length_at_budget"]


def segment_advantages(horizon: int, lam: Lambda, *, cut_error: float = 0.0, error: float = 0.0) -> list[list[float]]:
    """Advantages of the tokens of each path; the segments, of at most ``horizon`` tokens, are separate sequences of one pack.

    The critic is off by ``error`` in every state and by ``cut_error`` besides in the state after a cut. ``lam``: a number, or
    length-adaptive with the response's length so far: at the segment's end, or where the segment would end if the response went on.
    """
    segments = [(path, at, min(at + horizon, len(path.tokens))) for path in ALL for at in range(0, len(path.tokens), horizon)]
    inside = [(path, t) for path, start, end in segments for t in range(start, end)]
    values = torch.tensor([value(path.states[t]) + error for path, t in inside], dtype=torch.float64)
    rewards = torch.tensor([reward(path.states[t + 1]) for path, t in inside], dtype=torch.float64)
    after = [path.states[end] for path, _, end in segments]
    bootstrap = torch.tensor([0.0 if is_final(state) else value(state) + error + cut_error for state in after], dtype=torch.float64)
    bounds = torch.tensor([0, *(end - start for _, start, end in segments)]).cumsum(0)
    length = {"length_so_far": [end for _, _, end in segments], "length_at_budget": [start + horizon for _, start, _ in segments]}
    lambdas = length_adaptive_lambda(torch.tensor(length[lam]), ALPHA) if isinstance(lam, str) else lam
    flat = packed_gae_decoupled(rewards, values, torch.ones_like(values).bool(), bounds, lambdas, 1.0, GAMMA, bootstrap)[0]
    return [part.tolist() for part in flat.split([len(path.tokens) for path in ALL])]


def largest_bias(horizon: int, lam: Lambda) -> float:
    """Largest |E[advantage | state, token] - (Q - V)| over all states and tokens, with the exact critic."""
    weight: dict[tuple[State, int], float] = {}
    total: dict[tuple[State, int], float] = {}
    for path, advantages in zip(ALL, segment_advantages(horizon, lam), strict=True):
        for key, advantage in zip(zip(path.states, path.tokens, strict=False), advantages, strict=True):
            weight[key] = weight.get(key, 0.0) + path.probability
            total[key] = total.get(key, 0.0) + path.probability * advantage
    assert len(weight) > 60
    return max(abs(total[key] / weight[key] - (action_value(*key) - value(key[0]))) for key in weight)


def test_the_enumeration_is_complete() -> None:
    assert math.fsum(path.probability for path in ALL) == pytest.approx(1, abs=1e-12)
    returns = math.fsum(path.probability * GAMMA ** (len(path.tokens) - 1) * reward(path.states[-1]) for path in ALL)
    assert value((0, 0, 0)) == pytest.approx(returns, abs=1e-12)
    assert {len(path.tokens) for path in ALL} == set(range(1, LONGEST + 1))


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0, "length_at_budget"])
@pytest.mark.parametrize("horizon", [*HORIZONS, LONGEST])
def test_with_the_exact_critic_segments_have_the_advantages_of_whole_responses_in_expectation(horizon: int, lam: Lambda) -> None:
    assert largest_bias(horizon, lam) < 1e-12


def test_a_lambda_of_the_final_length_is_biased_for_whole_responses_and_less_for_segments() -> None:
    """The final length depends on tokens to come: E[advantage] is not Q - V even with the exact critic, with or without a horizon."""
    whole = largest_bias(LONGEST, "length_so_far")
    assert 0.02 < whole < 1
    assert 1e-3 < largest_bias(3, "length_so_far") < whole


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("horizon", HORIZONS)
def test_a_value_at_the_cut_that_is_off_decays_with_the_distance_to_the_cut(horizon: int, lam: float) -> None:
    """An error d of the cut state's value adds gamma d to the last TD error, so gamma (gamma lambda)^k d to the token k before it."""
    delta = 0.3
    exact, shifted = segment_advantages(horizon, lam), segment_advantages(horizon, lam, cut_error=delta)
    for before, after in zip(exact, shifted, strict=True):
        count = len(before)
        last_cut = (count - 1) // horizon * horizon  # the tokens from here on belong to the segment that ends the response
        for t in range(count):
            expected = GAMMA * (GAMMA * lam) ** (horizon - 1 - t % horizon) * delta if t < last_cut else 0.0
            assert abs(after[t] - before[t] - expected) < 1e-12


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("horizon", [*HORIZONS, LONGEST])
def test_a_critic_that_is_off_everywhere(horizon: int, lam: float) -> None:
    """A constant error d adds (gamma - 1) d to each TD error with a successor and -d to that of the response's last token."""
    delta = -0.4
    exact, shifted = segment_advantages(horizon, lam), segment_advantages(horizon, lam, error=delta)
    for before, after in zip(exact, shifted, strict=True):
        count = len(before)
        for t in range(count):
            end = min((t // horizon + 1) * horizon, count)
            errors = [-delta if j == count - 1 else (GAMMA - 1) * delta for j in range(t, end)]
            expected = math.fsum((GAMMA * lam) ** k * error for k, error in enumerate(errors))
            assert abs(after[t] - before[t] - expected) < 1e-12


def decoupled_reference(
    new: list[float], proximal: list[float], behaviour: list[float], advantage: list[float], low: float, high: float, cap: float
) -> tuple[list[float], list[float]]:
    """Per-token loss of arXiv:2505.24298 (decoupled objective; arXiv:2110.00641, Eq. 12) and its derivative, with min(weight, cap).

    loss = -w min(u A, clip(u) A) with u = pi / pi_prox and w = pi_prox / pi_behaviour; where the clipped side is the smaller one the
    derivative is 0, else -w A u.
    """
    losses, slopes = [], []
    for n, p, b, a in zip(new, proximal, behaviour, advantage, strict=True):
        u, w = math.exp(n - p), min(math.exp(p - b), cap)
        clipped = min(max(u, 1 - low), 1 + high)
        losses.append(-w * min(u * a, clipped * a))
        slopes.append(-w * a * u if u * a <= clipped * a else 0.0)
    return losses, slopes


@pytest.mark.parametrize("cap", [2.0, 1e6])
def test_the_loss_with_an_importance_correction_is_the_decoupled_objective(cap: float) -> None:
    """``old_logprobs`` are the proximal policy's, ``rollout_logprobs`` those of whichever older policy sampled each token."""
    generator = torch.Generator().manual_seed(3)
    count = 400
    behaviour = -3 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.1
    staleness = torch.randint(0, 4, (count,), generator=generator)
    proximal = behaviour + 0.4 * staleness * torch.randn(count, generator=generator, dtype=torch.float64)
    new = (proximal + 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    everything, bounds = torch.ones(count, dtype=torch.bool), torch.tensor([0, 150, 400])
    weights = importance_weights(proximal, behaviour, everything, bounds, kind="token_truncate", cap=cap)
    terms, _ = policy_loss_terms(new, proximal, advantages, everything, clip_low=0.2, clip_high=0.28, importance_weights=weights)
    terms.sum().backward()
    columns = (column.detach().tolist() for column in (new, proximal, behaviour, advantages))
    losses, slopes = decoupled_reference(*columns, 0.2, 0.28, cap)
    torch.testing.assert_close(terms.detach(), torch.tensor(losses, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert 20 < slopes.count(0.0) < count - 20  # both sides of the clip occur
    assert bool((weights == cap).any()) == (cap == 2.0)  # and so does the cap where it is near
    fresh = staleness == 0  # tokens of this step's policy: plain PPO
    assert torch.equal(weights[fresh], torch.ones_like(weights[fresh]))
