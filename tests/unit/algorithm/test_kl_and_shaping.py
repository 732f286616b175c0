"""KL estimators, rewards from scores, the KL penalty in the reward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vapo_mcore.algorithm.advantages import packed_gae_decoupled
from vapo_mcore.algorithm.kl import kl_estimate, kl_loss_terms
from vapo_mcore.algorithm.segments import place_terminal_rewards
from vapo_mcore.algorithm.shaping import kl_penalised_rewards, scale_reward, scale_truncated, shape_rewards, soft_overlong_penalty

KINDS = ["k1", "k2", "k3"]


def test_estimators_by_hand() -> None:
    logprobs, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.5])
    assert kl_estimate(logprobs, reference, "k1").tolist() == pytest.approx([1.0, -0.5])
    assert kl_estimate(logprobs, reference, "k2").tolist() == pytest.approx([0.5, 0.125])
    assert kl_estimate(logprobs, reference, "k3").tolist() == pytest.approx([math.exp(-1) - 1 + 1, math.exp(0.5) - 1 - 0.5], rel=1e-5)


def test_a_clamp_bounds_the_estimate_and_stops_its_gradient() -> None:
    reference, mask = torch.tensor([-4.5, -1.5, -0.5]), torch.ones(3, dtype=torch.bool)
    logprobs = torch.tensor([-1.0, -1.0, -3.5], requires_grad=True)  # differences 3.5, 0.5 and -3
    for kind, expected in (("k1", [2.0, 0.5, -2.0]), ("k2", [2.0, 0.125, 2.0]), ("k3", [2.0, math.exp(-0.5) - 0.5, 2.0])):
        assert kl_estimate(logprobs, reference, kind, clamp=2.0).tolist() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(kl_loss_terms(logprobs, reference, mask, "k2", 2.0).sum(), logprobs)
    assert gradient.tolist() == [0.0, 0.5, 0.0]
    got = kl_penalised_rewards(torch.zeros(3), logprobs.detach(), reference, mask, kind="k1", coef=0.1, clamp=2.0)
    assert got.tolist() == pytest.approx([-0.2, -0.05, 0.2])


@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 1e-12), ("k3", 1e-12), ("k2", 0.02)])
def test_expectations_over_the_vocabulary(kind: str, tolerance: float) -> None:
    """k1 and k3 are unbiased: their exact expectation under the policy is the KL; k2 is close to it for close policies."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator, dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    reference = (logits + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    estimate = (logprobs.exp() * kl_estimate(logprobs, reference, kind)).sum()
    assert estimate.item() == pytest.approx(exact.item(), abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_nan_reaches_neither_estimate_nor_gradient(kind: str) -> None:
    logprobs = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-1.5, math.nan, -1.0]), kind, torch.tensor([True, False, True]))
    gradient = torch.autograd.grad(estimate.sum(), logprobs)[0]
    assert estimate[1] == 0 and gradient[1] == 0 and estimate.isfinite().all() and gradient.isfinite().all()


def test_k1_is_refused_as_a_loss_and_the_others_pull_towards_the_reference() -> None:
    logprobs, mask = torch.tensor([-1.0], requires_grad=True), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match="zero"):
        kl_loss_terms(logprobs, torch.tensor([-2.0]), mask, "k1")
    assert torch.autograd.grad(kl_loss_terms(logprobs, torch.tensor([-2.0]), mask, "k2").sum(), logprobs)[0].item() == pytest.approx(1.0)
    (gradient,) = torch.autograd.grad(kl_loss_terms(logprobs, torch.tensor([-2.0]), mask, "k3").sum(), logprobs)
    assert gradient.item() == pytest.approx(1 - math.exp(-1), rel=1e-6)
    with pytest.raises(ValueError, match="kind must be"):
        kl_estimate(logprobs, logprobs, "k4")


def test_scenario_10_reward_scaling() -> None:
    assert scale_reward(torch.tensor([0.0, 1.0]), (0, 1), (-1, 1)).tolist() == [-1, 1]
    assert scale_reward(torch.tensor([-2.8, -0.25, 1.5]), (-2, 2), (-1, 1)).tolist() == pytest.approx([-1, -0.125, 0.75])
    with pytest.raises(ValueError, match="low < high"):
        scale_reward(torch.zeros(1), (1, 1), (-1, 1))


def test_scenario_11_and_trap_7_kl_in_the_reward_reaches_the_returns() -> None:
    old = torch.tensor([-1.0, -2.0, -1.5])
    mask, cu_seqlens = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    rewards = place_terminal_rewards(torch.tensor([1.0]), mask, cu_seqlens)
    rewards = kl_penalised_rewards(rewards, old, old - 2, mask, kind="k1", coef=0.1)
    advantages, returns = packed_gae_decoupled(rewards, torch.zeros(3), mask, cu_seqlens, 1.0, 1.0)
    assert advantages.tolist() == pytest.approx([0.4, 0.6, 0.8])
    assert returns.tolist() == pytest.approx([0.4, 0.6, 0.8])


def test_kl_penalty_skips_masked_tokens() -> None:
    mask = torch.tensor([False, True, False])
    nan = torch.tensor([math.nan, -1.0, math.nan])
    got = kl_penalised_rewards(torch.tensor([math.nan, 1.0, 5.0]), nan, nan - 0.5, mask, kind="k1", coef=0.2)
    assert got.tolist() == pytest.approx([0, 0.9, 0])


@settings(max_examples=50)
@given(st.integers(0, 300), st.integers(1, 100), st.integers(100, 200), st.floats(0, 3))
def test_soft_overlong_penalty_is_equation_13(length: int, cache: int, maximum: int, penalty: float) -> None:
    start = maximum - cache
    expected = 0.0 if length <= start else (start - length) / cache if length <= maximum else -1.0
    assert soft_overlong_penalty(length, maximum, cache, penalty) == pytest.approx(expected * penalty)
    as_tensor = soft_overlong_penalty(torch.tensor([length, length]), maximum, cache, penalty)
    assert as_tensor.dtype == torch.float32 and as_tensor.tolist() == pytest.approx([expected * penalty] * 2)


def test_soft_overlong_penalty_edges() -> None:
    assert isinstance(soft_overlong_penalty(5, 10, 4), float)
    assert math.copysign(1, soft_overlong_penalty(0, 10, 4)) == 1.0  # 0.0, not -0.0: this is logged
    assert [soft_overlong_penalty(n, 10, 0) for n in (9, 10, 11)] == [0, 0, -1]
    for arguments in ((1, 10, 11), (1, 10, -1), (1, 10, 4, -1.0)):
        with pytest.raises(ValueError, match="cache"):
            soft_overlong_penalty(*arguments)


def test_shape_rewards_in_the_fixed_order() -> None:
    scores, lengths = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([10, 20, 20])
    truncated = torch.tensor([False, True, True])
    got = shape_rewards(scores, lengths, truncated, scale=((0, 1), (-1, 1)), truncated_factor=0.5, overlong=(20, 8, 1.0))
    assert got.tolist() == pytest.approx([1.0, 0.5 - 1, -0.5 - 1])
    assert shape_rewards(scores, lengths, truncated).tolist() == [1, 1, 0]
    assert shape_rewards(torch.tensor([1, 0]), lengths[:2], truncated[:2]).dtype == torch.float32
    with pytest.raises(ValueError, match="factor"):
        scale_truncated(scores, truncated, 1.5)
