"""Packed GAE against a float64 recurrence in plain Python, and against values worked out by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vapo_mcore.algorithm import gae_kernel
from vapo_mcore.algorithm.advantages import packed_gae, packed_gae_decoupled, reward_to_go
from vapo_mcore.algorithm.lambdas import length_adaptive_lambda
from vapo_mcore.algorithm.segments import keep_responses, place_terminal_rewards

Response = tuple[list[float], list[float], list[bool]]


def oracle(response: Response, lam: float, gamma: float, bootstrap: float) -> tuple[list[float], list[float]]:
    """From the definition, not the recurrence: A_t = sum_k (gamma lam)^k delta_{t+k} over the response's unmasked tokens."""
    rewards, values, mask = response
    kept = [t for t, here in enumerate(mask) if here]
    states = [values[t] for t in kept] + [bootstrap]
    deltas = [rewards[t] + gamma * states[k + 1] - states[k] for k, t in enumerate(kept)]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for k, t in enumerate(kept):
        advantages[t] = math.fsum((gamma * lam) ** j * delta for j, delta in enumerate(deltas[k:]))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def pack(responses: list[Response], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def flat(column: int, kind: torch.dtype) -> Tensor:
        return torch.tensor([x for response in responses for x in response[column]], dtype=kind)

    bounds = torch.tensor([0, *(len(response[2]) for response in responses)]).cumsum(0)
    return flat(0, dtype), flat(1, dtype), flat(2, torch.bool), bounds


def single(rewards: list[float], values: list[float], mask: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pack([(rewards, values, [bool(m) for m in mask or [1] * len(values)])])


def assert_close(got: Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


number = st.floats(-2, 2, width=32)


@st.composite
def packs(draw: st.DrawFn) -> dict[str, Any]:
    responses = []
    for length in draw(st.lists(st.integers(0, 12), min_size=0, max_size=6)):
        column = st.lists(number, min_size=length, max_size=length)
        responses.append((draw(column), draw(column), draw(st.lists(st.booleans(), min_size=length, max_size=length))))
    count = len(responses)
    unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    lam = st.lists(unit, min_size=count, max_size=count)
    return {
        "responses": responses,
        "lam_policy": draw(lam),
        "lam_critic": draw(lam),
        "gamma": draw(unit),
        "bootstrap": draw(st.one_of(st.none(), st.lists(number, min_size=count, max_size=count))),
    }


@settings(max_examples=60, deadline=None)
@given(packs())
def test_agrees_with_the_definition(case: dict[str, Any]) -> None:
    rewards, values, mask, cu_seqlens = pack(case["responses"])
    bootstrap = None if case["bootstrap"] is None else torch.tensor(case["bootstrap"])
    lams = [torch.tensor(case[name], dtype=torch.float64) for name in ("lam_policy", "lam_critic")]
    advantages, returns = packed_gae_decoupled(rewards, values, mask, cu_seqlens, *lams, case["gamma"], bootstrap)
    expected_advantages, expected_returns = [], []
    for i, response in enumerate(case["responses"]):
        after = 0.0 if bootstrap is None else case["bootstrap"][i]
        expected_advantages += oracle(response, case["lam_policy"][i], case["gamma"], after)[0]
        expected_returns += oracle(response, case["lam_critic"][i], case["gamma"], after)[1]
    assert_close(advantages, expected_advantages, 1e-5)
    assert_close(returns, expected_returns, 1e-5)
    assert not advantages[~mask].any() and not returns[~mask].any()


@settings(max_examples=25, deadline=None)
@given(packs(), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_stands_at_masked_positions_has_no_effect(case: dict[str, Any], poison: float) -> None:
    rewards, values, mask, cu_seqlens = pack(case["responses"])
    lams = [torch.tensor(case[name], dtype=torch.float64) for name in ("lam_policy", "lam_critic")]
    clean = packed_gae_decoupled(rewards, values, mask, cu_seqlens, *lams, case["gamma"])
    rewards[~mask], values[~mask] = poison, poison
    for got, expected in zip(packed_gae_decoupled(rewards, values, mask, cu_seqlens, *lams, case["gamma"]), clean, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 0.999, 1 - 1 / (0.05 * 16384), 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9999])
def test_float32_at_16k_tokens_is_the_float64_result_rounded(lam: float, gamma: float) -> None:
    generator = torch.Generator().manual_seed(1)
    length = 16384
    values = torch.rand(length, generator=generator) + 0.5  # all errors of one sign: nothing cancels
    rewards = torch.rand(length, generator=generator) * 1e-3
    mask = torch.rand(length, generator=generator) > 0.1
    advantages, returns = packed_gae(rewards, values, mask, torch.tensor([0, length]), lam, gamma, torch.tensor([0.7]))
    expected, after, successor = [0.0] * length, 0.0, float(torch.tensor(0.7))
    for t in range(length - 1, -1, -1):  # the definition's sum is quadratic; here a plain Python recurrence
        if mask[t]:
            after = float(rewards[t]) + gamma * successor - float(values[t]) + gamma * lam * after
            successor = float(values[t])
            expected[t] = after
    scale = max(1.0, max(abs(x) for x in expected))
    assert_close(advantages, expected, 1e-5 * scale)
    assert_close(returns[mask] - values[mask], [a for a, here in zip(expected, mask.tolist(), strict=True) if here], 1e-5 * scale)
    assert scale < 30  # the bound above is absolute for all practical purposes


def test_scenario_1_length_adaptive_lambda_leaves_the_returns_alone() -> None:
    lengths = torch.tensor([10, 20, 100, 1000])
    lam = length_adaptive_lambda(lengths, 0.05)
    assert_close(lam, [0, 0, 0.8, 0.98])
    cu_seqlens = torch.tensor([0, *lengths.tolist()]).cumsum(0)
    mask = torch.ones(1130, dtype=torch.bool)
    rewards = place_terminal_rewards(torch.ones(4), mask, cu_seqlens)
    values = torch.randn(1130, generator=torch.Generator().manual_seed(0))
    _, returns = packed_gae_decoupled(rewards, values, mask, cu_seqlens, lam, 1.0)
    assert_close(returns, [1.0] * 1130)


def test_scenario_2_by_hand() -> None:
    inputs = single([0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4])
    assert_close(packed_gae(*inputs, 1.0)[0], [0.9, 0.8, 0.7, 0.6])
    assert_close(packed_gae(*inputs, 0.95)[0], [0.799675, 0.7365, 0.67, 0.6])
    advantages, returns = packed_gae_decoupled(*inputs, 0.5, 1.0)
    assert_close(advantages, [0.25, 0.3, 0.4, 0.6])
    assert_close(returns, [1, 1, 1, 1])


@pytest.mark.parametrize("tool", [999.0, math.nan])
def test_scenario_3_a_gap_neither_decays_nor_earns(tool: float) -> None:
    advantages, _ = packed_gae(*single([0, 0, tool, 0, 1], [0.1, 0.2, tool, 0.4, 0.5], [1, 1, 0, 1, 1]), 0.95, 0.99)
    assert_close(advantages, [0.78232, 0.72762, 0, 0.56525, 0.5], 1e-5)
    without, _ = packed_gae(*single([0, 0, 0, 1], [0.1, 0.2, 0.4, 0.5]), 0.95, 0.99)
    assert torch.equal(advantages[[0, 1, 3, 4]], without)


def test_scenario_4_cut_response() -> None:
    inputs = single([0, 0], [0.2, 0.4])
    assert_close(packed_gae(*inputs, 1.0)[0], [-0.2, -0.4])
    assert_close(packed_gae(*inputs, 1.0, bootstrap=torch.tensor([0.6]))[0], [0.4, 0.2])


@pytest.mark.parametrize("pad", [0, 2])  # 2 is the EOS token: the mask decides, never the token's value
def test_scenario_5_reward_on_the_last_response_token(pad: int) -> None:
    eos = 2
    tokens = torch.tensor([7, 8, eos, pad, pad, 7, 8, 9, 7, 8, pad, pad])
    mask = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 5, 10, 12])
    rewards = place_terminal_rewards(torch.tensor([1.0, 0.5, math.nan]), mask, cu_seqlens)
    assert tokens[rewards > 0].tolist() == [eos, 8]
    assert rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0.5, 0, 0]
    advantages, returns = packed_gae(rewards, torch.full((12,), math.nan).masked_fill(mask, 0.25), mask, cu_seqlens, 1.0)
    assert_close(advantages, [0.75] * 3 + [0] * 2 + [0.25] * 5 + [0] * 2)
    assert_close(returns, [1.0] * 3 + [0] * 2 + [0.5] * 5 + [0] * 2)


def test_trap_6_a_masked_last_token_keeps_the_reward_in_the_response() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 5, 8])
    rewards = place_terminal_rewards(torch.tensor([1.0, 2.0]), mask, cu_seqlens)
    assert rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, 2]
    assert reward_to_go(rewards, mask, cu_seqlens).tolist() == [0, 1, 1, 0, 0, 2, 2, 2]


def test_empty_responses_and_an_empty_pack_are_harmless() -> None:
    rewards, values, mask, _ = single([0, 1, 0, 1], [0.5, 0.5, 0.25, 0.25])
    with_empty = torch.tensor([0, 0, 2, 2, 2, 4, 4])
    bootstrap = torch.full((6,), math.nan)
    bootstrap[[1, 4]] = 0.0
    got = packed_gae(rewards, values, mask, with_empty, torch.tensor([0.0, 0.9, 1.0, 0.5, 0.3, 0.0]), 1.0, bootstrap)
    expected = packed_gae(rewards, values, mask, torch.tensor([0, 2, 4]), torch.tensor([0.9, 0.3]))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    nothing = torch.zeros(0)
    for cu_seqlens in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        assert [x.numel() for x in packed_gae(nothing, nothing, nothing.bool(), cu_seqlens, 0.95)] == [0, 0]


def test_overlong_filtering_removes_a_response_and_leaves_its_neighbours() -> None:
    rewards, values, mask, cu_seqlens = pack([([0.0, 1.0], [0.1, 0.2], [True, True]), ([0.0, 0.0], [0.3, 0.4], [True, True])])
    kept = keep_responses(mask, cu_seqlens, torch.tensor([True, False]))
    advantages, _ = packed_gae(rewards, values, kept, cu_seqlens, 1.0)
    assert_close(advantages, [0.9, 0.8, 0, 0])


def test_threads_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 400, (64,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    rewards, values = torch.randn(2, total, generator=generator)
    mask = torch.rand(total, generator=generator) > 0.2
    alone = packed_gae(rewards, values, mask, cu_seqlens, 0.95)
    monkeypatch.setattr(gae_kernel, "_MIN_TOKENS_PER_THREAD", 1)
    for threads in (2, 7, 200):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(torch.equal(a, b) for a, b in zip(packed_gae(rewards, values, mask, cu_seqlens, 0.95), alone, strict=True))


def test_dtypes_layouts_and_gradients() -> None:
    rewards, values, mask, cu_seqlens = single([0, 0, 1], [0.1, 0.2, 0.3])
    assert packed_gae(rewards.double(), values.double(), mask, cu_seqlens, 0.95)[0].dtype == torch.float64
    assert packed_gae(rewards.bfloat16(), values.bfloat16(), mask, cu_seqlens, 0.95)[1].dtype == torch.float32
    spread = torch.stack([values, values], 1)[:, 0].requires_grad_()  # not contiguous, and part of a graph
    for got, expected in zip(
        packed_gae(rewards, spread, mask, cu_seqlens.int(), torch.tensor(0.95)),
        packed_gae(rewards, values, mask, cu_seqlens, 0.95),
        strict=True,
    ):
        assert torch.equal(got, expected) and not got.requires_grad


def test_nan_at_a_response_token_is_not_hidden() -> None:
    advantages, _ = packed_gae(*single([0, 0, 1], [0.1, math.nan, 0.3]), 0.95)
    assert advantages.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(3)}, "values has shape"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "rise from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "rise from 0 to 4"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "rise from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "integer"),
        ({"lam": 1.5}, r"lie in \[0, 1\]"),
        ({"lam": torch.tensor([0.5, math.nan])}, r"lie in \[0, 1\]"),
        ({"lam": torch.ones(3)}, "one per sequence"),
        ({"gamma": -0.1}, "gamma"),
        ({"bootstrap": torch.zeros(1)}, "bootstrap"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "rewards": torch.zeros(4),
        "values": torch.zeros(4),
        "mask": torch.ones(4, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 2, 4]),
        "lam": 0.95,
        "gamma": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        packed_gae(**{**arguments, **change})
