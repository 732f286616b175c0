"""Losses: scenarios, a plain-Python oracle, invariance under splitting, NaN at masked positions, gradients."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vapo_mcore.algorithm.losses import (
    explained_variance,
    policy_loss,
    policy_loss_terms,
    positive_nll,
    positive_nll_terms,
    value_loss,
    value_loss_terms,
)
from vapo_mcore.algorithm.segments import keep_responses, response_lengths
from vapo_mcore.algorithm.weights import Denominators, positive_token_weights, token_weights

AGGREGATIONS = ["token", "sequence", "sequence_sum", "fixed_length"]
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def policy_oracle(
    case: dict[str, Any], clip_low: float, clip_high: float, dual_clip: float | None, aggregation: str, max_length: int
) -> float:
    per_response = []
    for lo, hi in zip(case["bounds"], case["bounds"][1:], strict=False):
        terms = []
        for t in range(lo, hi):
            if case["mask"][t]:
                ratio = math.exp(max(-20.0, min(20.0, case["logprobs"][t] - case["old"][t])))
                a = case["advantages"][t]
                objective = min(ratio * a, max(1 - clip_low, min(1 + clip_high, ratio)) * a)
                terms.append(-(max(objective, dual_clip * a) if dual_clip is not None and a < 0 else objective))
        if terms:
            per_response.append(terms)
    if not per_response:
        return 0.0
    tokens = sum(len(terms) for terms in per_response)
    if aggregation == "token":
        return math.fsum(x for terms in per_response for x in terms) / tokens
    divisors = {"sequence": None, "sequence_sum": 1, "fixed_length": max_length}
    sums = [math.fsum(terms) / (divisors[aggregation] or len(terms)) for terms in per_response]
    return math.fsum(sums) / len(sums)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    total = sum(lengths)
    numbers = st.lists(st.floats(-3, 3, width=32), min_size=total, max_size=total)
    return {
        "bounds": [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        "mask": draw(st.lists(st.booleans(), min_size=total, max_size=total)),
        **{name: draw(numbers) for name in ("logprobs", "old", "advantages")},
    }


def tensors(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    floats = [torch.tensor(case[name], dtype=torch.float64) for name in ("logprobs", "old", "advantages")]
    return (*floats, torch.tensor(case["mask"], dtype=torch.bool), torch.tensor(case["bounds"]))


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from([None, 1.5, 3.0]))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_policy_loss_agrees_with_plain_python(aggregation: Any, case: dict[str, Any], dual_clip: float | None) -> None:
    loss, _ = policy_loss(*tensors(case), **CLIPS, dual_clip=dual_clip, aggregation=aggregation, max_length=9)
    assert loss.item() == pytest.approx(policy_oracle(case, 0.2, 0.28, dual_clip, aggregation, 9), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_gradient_is_the_derivative(aggregation: Any, dual_clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    mask, cu_seqlens = torch.rand(12, generator=generator) > 0.3, torch.tensor([0, 5, 5, 12])

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, old, advantages, mask, cu_seqlens, **CLIPS, dual_clip=dual_clip, aggregation=aggregation, max_length=9)[0]

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


# ---- Scenarios -------------------------------------------------------------------------------------------------------------


def test_scenario_6_value_loss() -> None:
    mask = torch.ones(1, dtype=torch.bool)
    loss, _ = value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0]), mask, clip=0.2)
    assert loss.item() == pytest.approx(0.5)
    loss, stats = value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), mask, clip=0.2)
    assert (loss.item(), stats["clip_frac"].item()) == (pytest.approx(0.32), 1.0)


def test_scenario_7_token_mean_over_micro_batches() -> None:
    """Two responses, 2 tokens of loss 1 and 8 of loss 0: .2, and the same gradient, in one call, two calls, on two ranks."""
    logprobs = torch.zeros(10, requires_grad=True)
    advantages = torch.tensor([-1.0] * 2 + [0.0] * 8)
    mask, cu_seqlens = torch.ones(10, dtype=torch.bool), torch.tensor([0, 2, 10])
    whole, _ = policy_loss(logprobs, torch.zeros(10), advantages, mask, cu_seqlens, **CLIPS)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    assert whole.item() == pytest.approx(0.2)
    denominators = Denominators.from_lengths(torch.tensor([2, 8]))
    parts = [
        policy_loss(logprobs[s], torch.zeros(10)[s], advantages[s], mask[s], cu, **CLIPS, denominators=denominators)[0]
        for s, cu in ((slice(0, 2), torch.tensor([0, 2])), (slice(2, 10), torch.tensor([0, 8])))
    ]
    assert torch.stack(parts).sum().item() == pytest.approx(0.2)
    assert torch.equal(torch.autograd.grad(torch.stack(parts).sum(), logprobs)[0], gradient)


def test_scenario_8_dual_clip() -> None:
    ratio = torch.tensor([0.5, 1.0, 10.0])
    terms, indicators = policy_loss_terms(
        ratio.log(),
        torch.zeros(3),
        torch.tensor([1.0, -1.0, -4.0]),
        torch.ones(3, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    torch.testing.assert_close(terms, torch.tensor([-0.5, 1.0, 12.0]))
    assert terms.mean().item() == pytest.approx(4.1667, abs=1e-4)
    assert indicators["clip_frac_dual"].tolist() == [0, 0, 1]


def test_scenario_26_denominators_are_exact() -> None:
    lengths = torch.full((512,), 33_000, dtype=torch.int64)
    lengths[0] -= 1
    assert Denominators.from_lengths(lengths, torch.ones(512, dtype=torch.bool)) == Denominators(16_895_999, 512, 16_895_999)


def test_policy_statistics_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0, 9.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.bool)
    _, stats = policy_loss(ratio.log(), torch.zeros(6), advantages, mask, torch.tensor([0, 6]), **CLIPS)
    k3 = [r - 1 - math.log(r) for r in ratio[:5].tolist()]
    expected = {
        "clip_frac_high": 0.2,
        "clip_frac_low": 0.2,
        "clip_frac_dual": 0.0,
        "approx_kl": sum(k3) / 5,
        "ratio_mean": 1.0,
    }
    assert {name: stat.item() for name, stat in stats.items()} == pytest.approx(expected)


def test_approx_kl_of_tiny_differences_is_not_rounding_noise() -> None:
    """The first-step invariant (approx KL <= 1e-6) needs a k3 that float32 does not drown; r - 1 - log r as written does."""
    difference = 1e-4
    _, stats = policy_loss(
        torch.full((8,), -1.0),
        torch.full((8,), -1.0 - difference),
        torch.zeros(8),
        torch.ones(8, dtype=torch.bool),
        torch.tensor([0, 8]),
        **CLIPS,
    )
    assert stats["approx_kl"].item() == pytest.approx(difference**2 / 2, rel=2e-2)


def test_extreme_log_ratios_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -400.0], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.tensor([-400.0, 0.0]), torch.tensor([-1.0, -1.0]), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]), **CLIPS
    )
    assert loss.item() == pytest.approx((math.exp(20) + 0.8) / 2, rel=1e-5)
    assert all(math.isfinite(stat.item()) for stat in stats.values())
    assert torch.autograd.grad(loss, logprobs)[0].isfinite().all()


def test_importance_weights_multiply_the_terms() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages, weights = torch.randn(4, 8, generator=generator)
    mask = torch.tensor([1] * 7 + [0], dtype=torch.bool)
    weights[7] = math.nan
    plain, _ = policy_loss_terms(logprobs, old, advantages, mask, **CLIPS)
    weighted, _ = policy_loss_terms(logprobs, old, advantages, mask, **CLIPS, importance_weights=weights)
    torch.testing.assert_close(weighted[:7], plain[:7] * weights[:7])
    assert weighted[7] == 0


# ---- Denominators of the whole mini-batch (traps 2, 5, 9, 10) --------------------------------------------------------------


def random_minibatch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 1, 0, 9, 4, 2, 7])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu_seqlens[-1])
    names = ("logprobs", "old_logprobs", "advantages", "values", "old_values", "returns")
    batch: dict[str, Tensor] = {name: torch.randn(total, generator=generator, dtype=torch.float64) for name in names}
    mask = torch.rand(total, generator=generator) > 0.25
    batch["mask"] = keep_responses(mask, cu_seqlens, torch.tensor([1, 0, 1, 1, 1, 1, 1]))  # response 1 is filtered
    batch["cu_seqlens"] = cu_seqlens
    batch["positive"] = torch.tensor([True, True, False, False, True, False, True])
    return batch


def total_loss(
    batch: dict[str, Tensor], rows: list[int], aggregation: Any, denominators: Denominators | None
) -> tuple[Tensor, dict[str, Any]]:
    """Policy + value + NLL of some responses of the mini-batch, in the given order."""
    bounds = batch["cu_seqlens"].tolist()
    index = torch.tensor([t for i in rows for t in range(bounds[i], bounds[i + 1])], dtype=torch.int64)
    lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in rows], dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    part = {name: batch[name][index] for name in batch if name not in ("cu_seqlens", "positive")}
    policy, stats = policy_loss(
        *(part[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")),
        cu_seqlens,
        **CLIPS,
        aggregation=aggregation,
        max_length=10,
        denominators=denominators,
    )
    value, value_stats = value_loss(*(part[n] for n in ("values", "old_values", "returns", "mask")), clip=0.2, denominators=denominators)
    nll = positive_nll(part["logprobs"], part["mask"], torch.repeat_interleave(batch["positive"][rows], lengths), denominators)
    return policy + 0.5 * value + 0.1 * nll, {**stats, "value_clip_frac": value_stats["clip_frac"]}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4], [5], [6]], [[6, 0, 3], [], [1, 2], [5, 4]], [[2, 1], [0, 3, 4, 5, 6]]])
def test_any_split_gives_the_same_loss_gradient_and_statistics(aggregation: Any, split: list[list[int]]) -> None:
    """Trap 2 (an NLL normalised per call grows with the calls) and trap 9 (empty micro-batch) included."""
    batch = random_minibatch(0)
    denominators = Denominators.from_mask(batch["mask"], batch["cu_seqlens"], batch["positive"])
    inputs = [batch["logprobs"].requires_grad_(), batch["values"].requires_grad_()]
    whole, stats = total_loss(batch, list(range(7)), aggregation, None)
    gradients = torch.autograd.grad(whole, inputs)
    parts = [total_loss(batch, rows, aggregation, denominators) for rows in split]
    summed = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(summed, whole, rtol=0, atol=1e-7)
    for got, expected in zip(torch.autograd.grad(summed, inputs), gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
    for name, stat in stats.items():
        assert sum(part[name].item() for _, part in parts) == pytest.approx(stat.item(), abs=1e-7), name


def test_terms_times_weights_are_the_losses_in_any_order_of_tokens() -> None:
    """What the engine does: weights computed on whole sequences, tokens then cut into arbitrary pieces (context parallelism)."""
    batch = random_minibatch(1)
    mask = batch["mask"]
    weights = token_weights(mask, batch["cu_seqlens"], "sequence")
    whole, _ = policy_loss(
        batch["logprobs"], batch["old_logprobs"], batch["advantages"], mask, batch["cu_seqlens"], **CLIPS, aggregation="sequence"
    )
    pieces = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(0)).split(5)
    sums = [
        (policy_loss_terms(*(batch[n][p] for n in ("logprobs", "old_logprobs", "advantages", "mask")), **CLIPS)[0] * weights[p]).sum()
        for p in pieces
    ]
    torch.testing.assert_close(torch.stack(sums).sum(), whole, rtol=0, atol=1e-7)


def test_trap_5_the_critic_learns_on_response_tokens_only() -> None:
    values = torch.tensor([5.0, 1.0, 5.0, 3.0], requires_grad=True)
    mask = torch.tensor([0, 1, 0, 1], dtype=torch.bool)  # prompt and tool tokens are attended to, and not trained on
    loss, _ = value_loss(values, None, torch.zeros(4), mask)
    assert loss.item() == pytest.approx((1 + 9) / 4)
    assert torch.autograd.grad(loss, values)[0].tolist() == [0, 0.5, 0, 1.5]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token", [1 / 5] * 5), ("sequence", [1 / 4] * 2 + [1 / 6] * 3), ("fixed_length", [1 / 20] * 5), ("sequence_sum", [1 / 2] * 5)],
)
def test_token_weights_by_hand(aggregation: Any, expected: list[float]) -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    weights = token_weights(mask, torch.tensor([0, 3, 4, 8]), aggregation, max_length=10)
    assert weights.dtype == torch.float32
    assert weights[mask].tolist() == pytest.approx(expected) and not weights[~mask].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_fully_masked_mini_batch_is_zero_not_nan(aggregation: Any) -> None:
    nan = torch.full((4,), math.nan, requires_grad=True)
    mask, cu_seqlens = torch.zeros(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    policy, stats = policy_loss(nan, nan, nan, mask, cu_seqlens, **CLIPS, dual_clip=3.0, aggregation=aggregation, max_length=4)
    value, _ = value_loss(nan, nan, nan, mask, clip=0.2)
    total = policy + value + positive_nll(nan, mask, torch.ones(4, dtype=torch.bool))
    assert total.item() == 0.0
    assert torch.autograd.grad(total, nan)[0].tolist() == [0.0] * 4
    assert all(stat.item() == 0.0 for stat in stats.values())


def test_positive_nll_by_hand_and_without_a_correct_response() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0], requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1], dtype=torch.bool)
    loss = positive_nll(logprobs, mask, torch.tensor([1, 1, 1, 0], dtype=torch.bool))
    assert loss.item() == pytest.approx(2.5)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-0.5, 0, -0.5, 0]
    none = positive_nll(logprobs, mask, torch.zeros(4, dtype=torch.bool))
    assert none.item() == 0.0 and torch.autograd.grad(none, logprobs)[0].tolist() == [0.0] * 4
    positive = torch.tensor([1, 1, 1, 0], dtype=torch.bool)
    assert (positive_nll_terms(logprobs, mask, positive) * positive_token_weights(mask, positive)).sum().item() == pytest.approx(2.5)


# ---- NaN at masked positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_poison_at_masked_positions_changes_neither_loss_nor_gradient(aggregation: Any, poison: float) -> None:
    clean = random_minibatch(2)
    poisoned = {name: x.clone() for name, x in clean.items()}
    for name in ("logprobs", "old_logprobs", "advantages", "values", "old_values", "returns"):
        poisoned[name][~clean["mask"]] = poison
    results = []
    for batch in (clean, poisoned):
        inputs = [batch["logprobs"].requires_grad_(), batch["values"].requires_grad_()]
        loss, stats = total_loss(batch, list(range(7)), aggregation, None)
        results.append((loss, *torch.autograd.grad(loss, inputs), *stats.values()))
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(got, expected) and got.isfinite().all()


def test_only_the_trained_tensor_gets_a_gradient() -> None:
    logprobs, old, advantages, values, old_values, returns = (torch.randn(4, requires_grad=True) for _ in range(6))
    mask, cu_seqlens = torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    loss = policy_loss(logprobs, old, advantages, mask, cu_seqlens, **CLIPS)[0] + value_loss(values, old_values, returns, mask, clip=0.2)[0]
    got = torch.autograd.grad(loss, [logprobs, values, old, advantages, old_values, returns], allow_unused=True)
    assert [g is None for g in got] == [False, False, True, True, True, True]


def test_value_terms_gradient_is_the_derivative() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    mask = torch.rand(10, generator=generator) > 0.3
    for clip in (None, 0.2):
        assert torch.autograd.gradcheck(
            lambda x, clip=clip: value_loss_terms(x, old_values, returns, mask, clip=clip)[0].sum(), (values.clone().requires_grad_(),)
        )


def test_half_precision_logprobs_are_subtracted_in_float32() -> None:
    logprobs = torch.full((4,), -1.0, dtype=torch.bfloat16)
    terms, _ = policy_loss_terms(logprobs, torch.full((4,), -1.001), torch.ones(4), torch.ones(4, dtype=torch.bool), **CLIPS)
    assert terms.dtype == torch.float32
    torch.testing.assert_close(terms, torch.full((4,), -math.exp(0.001)))


# ---- Explained variance (trap 10) ------------------------------------------------------------------------------------------


def test_explained_variance() -> None:
    mask = torch.tensor([1, 1, 1, 1, 0], dtype=torch.bool)
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0, math.nan])
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.tensor([0.5, 0.5, 0.5, 0.5, math.nan]), returns, mask) == pytest.approx(0.0)
    assert explained_variance(1 - returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns + 7, returns, mask) == pytest.approx(1.0)  # a constant offset is not variance


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6, -3.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_of_constant_returns_is_undefined(constant: float, dtype: torch.dtype) -> None:
    mask = torch.ones(1001, dtype=torch.bool)
    assert explained_variance(torch.randn(1001, dtype=dtype), torch.full((1001,), constant, dtype=dtype), mask) is None
    assert explained_variance(torch.randn(1001), torch.randn(1001), torch.zeros(1001, dtype=torch.bool)) is None


def test_explained_variance_of_one_rare_success_is_defined() -> None:
    returns = torch.zeros(1_000_000)
    returns[3] = 1.0
    assert explained_variance(returns, returns, torch.ones(1_000_000, dtype=torch.bool)) == pytest.approx(1.0)


# ---- Wrong arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"aggregation": "mean"}, "aggregation must be"),
        ({"aggregation": "fixed_length"}, "max_length"),
        ({"aggregation": "fixed_length", "max_length": 0}, "max_length"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    x, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        policy_loss(x, x, x, mask, torch.tensor([0, 2]), **{**CLIPS, **change})


def test_more_wrong_arguments_are_refused() -> None:
    x, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="old_values"):
        value_loss(x, None, x, mask, clip=0.2)
    with pytest.raises(ValueError, match="clip range"):
        value_loss(x, x, x, mask, clip=0.0)
    with pytest.raises(ValueError, match="impossible counts"):
        Denominators(tokens=3, sequences=4)
    with pytest.raises(ValueError, match="old_logprobs has shape"):
        policy_loss(x, torch.zeros(1), x, mask, torch.tensor([0, 2]), **CLIPS)
    assert Denominators.from_lengths(response_lengths(mask, torch.tensor([0, 2]))) == Denominators(2, 1)
