"""The loss objects on plain tensors, against values worked out by hand, and free of anything at masked tokens."""

import math
from statistics import NormalDist
from typing import get_args

import pytest
import torch

from tests.unit.trainer.rollouts import make_config as config
from vapo_mcore.algorithm.losses import policy_loss, positive_nll, value_loss
from vapo_mcore.algorithm.weights import Aggregation, Denominators, positive_token_weights, token_weights
from vapo_mcore.config.architecture import ValueBins
from vapo_mcore.megatron.losses import CriticLoss, PolicyLoss, SupervisedLoss

NAN = math.nan


def policy_batch():
    """Ratios 0.5, 1, 10 with advantages 1, -1, -4, and two masked tokens that hold NaN."""
    old = torch.tensor([-1.0, -2.0, -3.0, NAN, NAN])
    log_ratio = torch.tensor([math.log(0.5), 0.0, math.log(10.0), NAN, NAN])
    logprobs = (old + log_ratio).requires_grad_()
    mask = torch.tensor([True, True, True, False, False])
    batch = {
        "mask": mask,
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, -1.0, -4.0, NAN, NAN]),
        "policy_weights": torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0, 0.0]),
        "positive_weights": torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]),
    }
    return logprobs, batch


def test_policy_loss_with_dual_clip_and_positive_nll():
    loss = PolicyLoss(config(policy_loss={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}, positive_lm={"coef": 0.1}))
    logprobs, batch = policy_batch()
    total, stats = loss({"logprobs": logprobs}, batch)
    # tokens -.5, 1, 12 (the dual clip holds the third); NLL of the first two tokens: mean of -(log .5 - 1) and 2
    nll = (1.0 - math.log(0.5) + 2.0) / 2
    assert stats["surrogate"].item() == pytest.approx((-0.5 + 1 + 12) / 3, abs=1e-5)
    assert stats["nll"].item() == pytest.approx(nll, abs=1e-6)
    assert total.item() == pytest.approx(12.5 / 3 + 0.1 * nll, abs=1e-5)
    assert stats["tokens"].item() == 3
    assert (stats["clipped_high"].item(), stats["clipped_low"].item(), stats["clipped_dual"].item()) == (0, 0, 1)
    assert stats["approx_kl"].item() == pytest.approx((0.5 - 1 - math.log(0.5)) + 0 + (10 - 1 - math.log(10)), rel=1e-5)
    assert stats["ratio"].item() == pytest.approx(11.5, rel=1e-6)
    total.backward()
    # first token: -A r / 3 from the surrogate, -0.1 / 2 from the NLL; second alike; third is held by the dual clip
    assert logprobs.grad[:3].tolist() == pytest.approx([-0.5 / 3 - 0.05, 1 / 3 - 0.05, 0.0], abs=1e-6)
    assert logprobs.grad[3:].tolist() == [0.0, 0.0]


def test_clip_higher_counts_each_side():
    loss = PolicyLoss(config(policy_loss={"clip_low": 0.2, "clip_high": 0.28}))
    old = torch.zeros(4)
    batch = {
        "mask": torch.ones(4, dtype=torch.bool),
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0]),
        "policy_weights": torch.full((4,), 0.25),
        "positive_weights": torch.zeros(4),
    }
    total, stats = loss({"logprobs": torch.tensor([1.27, 1.5, 0.5, 1.5]).log()}, batch)
    assert total.item() == pytest.approx(-(1.27 + 1.28 - 0.8 - 1.5) / 4, abs=1e-6)
    assert (stats["clipped_high"].item(), stats["clipped_low"].item()) == (1, 1)


def test_without_correct_responses_the_nll_is_exactly_zero():
    loss = PolicyLoss(config())
    logprobs, batch = policy_batch()
    batch["positive_weights"] = torch.zeros(5)
    total, stats = loss({"logprobs": logprobs}, batch)
    assert stats["nll"].item() == 0.0
    assert total.item() == stats["surrogate"].item()


def test_kl_and_entropy_terms_enter_with_their_coefficients():
    loss = PolicyLoss(config(kl={"place": "loss", "kind": "k2", "coef": 0.5}, entropy={"coef": 0.01}, positive_lm={"coef": 0.0}))
    assert loss.needs_entropy
    logprobs, batch = policy_batch()
    batch["ref_logprobs"] = logprobs.detach() - torch.tensor([1.0, 2.0, 0.0, NAN, NAN])
    entropy = torch.tensor([1.0, 2.0, 3.0, NAN, NAN])
    total, stats = loss({"logprobs": logprobs, "entropy": entropy}, batch)
    assert stats["kl"].item() == pytest.approx((0.5 + 2.0) / 3, abs=1e-6)
    assert stats["entropy"].item() == pytest.approx(6.0)
    assert total.item() == pytest.approx(stats["surrogate"].item() + 0.5 * 2.5 / 3 - 0.01 * 2.0, abs=1e-5)


def test_importance_weights_multiply_the_surrogate_only():
    loss = PolicyLoss(config(policy_loss={"importance_correction": {"kind": "token_truncate"}}))
    assert "importance_weights" in loss.tensors
    logprobs, batch = policy_batch()
    plain = -torch.tensor([0.5, -1.0, -40.0]) / 3
    batch["importance_weights"] = torch.tensor([2.0, 0.5, 0.0, NAN, NAN])
    _, stats = loss({"logprobs": logprobs}, batch)
    assert stats["surrogate"].item() == pytest.approx((plain * torch.tensor([2.0, 0.5, 0.0])).sum().item(), abs=1e-5)


def test_mismatch_is_measured_where_old_logprobs_are_the_rollouts():
    loss = PolicyLoss(config(rollout={"old_logprobs": "rollout"}))
    logprobs, batch = policy_batch()
    _, stats = loss({"logprobs": logprobs, "entropy": torch.zeros(5)}, batch)
    assert stats["mismatch_abs"].item() == pytest.approx(math.log(2) + math.log(10), rel=1e-5)
    assert stats["mismatch_abs_max"].item() == pytest.approx(math.log(10), rel=1e-5)
    assert stats["mismatch_ratio"].item() == pytest.approx(11.5, rel=1e-5)
    assert stats["mismatch_ratio_squared"].item() == pytest.approx(101.25, rel=1e-5)
    assert stats["mismatch_beyond_cap"].item() == 1


def test_policy_loss_of_a_dummy_microbatch_is_zero_with_the_same_statistics():
    loss = PolicyLoss(config(rollout={"old_logprobs": "rollout"}))
    logprobs, batch = policy_batch()
    _, full = loss({"logprobs": logprobs, "entropy": torch.zeros(5)}, batch)
    pads = torch.zeros(2, requires_grad=True)
    empty = {name: torch.zeros(2, dtype=tensor.dtype) for name, tensor in batch.items()}
    total, stats = loss({"logprobs": pads, "entropy": torch.zeros(2)}, empty)
    total.backward()
    assert total.item() == 0.0
    assert pads.grad.tolist() == [0.0, 0.0]
    assert set(stats) == set(full)
    assert all(float(value) == 0.0 for value in stats.values())


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_the_trained_losses_are_the_composed_ones(aggregation):
    """The losses of ``algorithm.losses``, which the known cases test, equal those of the engine with the trainer's weights."""
    generator = torch.Generator().manual_seed(3)
    mask, cu_seqlens = torch.rand(24, generator=generator) > 0.3, torch.tensor([0, 3, 11, 12, 24])
    graded = torch.tensor([True, False, False, True])
    positive = torch.repeat_interleave(graded, cu_seqlens.diff())
    noise, old, advantages, returns, before = torch.randn(5, 24, generator=generator)
    counts = Denominators.from_mask(mask, cu_seqlens, graded)
    clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}

    logprobs, other = (old + 0.4 * noise).requires_grad_(), (old + 0.4 * noise).requires_grad_()
    loss, expected = policy_loss(
        logprobs, old, advantages, mask, cu_seqlens, **clips, aggregation=aggregation, max_length=12, denominators=counts
    )
    (loss + 0.1 * positive_nll(logprobs, mask, positive, counts)).backward()
    batch = {
        "mask": mask,
        "old_logprobs": old,
        "advantages": advantages,
        "policy_weights": token_weights(mask, cu_seqlens, aggregation, 12, counts),
        "positive_weights": positive_token_weights(mask, positive, counts),
    }
    total, stats = PolicyLoss(config(policy_loss=clips, positive_lm={"coef": 0.1}))({"logprobs": other}, batch)
    total.backward()
    assert stats["surrogate"].item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(other.grad, logprobs.grad)
    names = {"clipped_high": "clip_frac_high", "clipped_low": "clip_frac_low", "clipped_dual": "clip_frac_dual", "ratio": "ratio_mean"}
    for name, composed in (names | {"approx_kl": "approx_kl"}).items():
        assert stats[name].item() / counts.tokens == pytest.approx(expected[composed].item(), abs=1e-6), name
    assert stats["clipped_high"] > 0 and stats["clipped_low"] > 0

    values, others = (before + noise).requires_grad_(), (before + noise).requires_grad_()
    loss, expected = value_loss(values, before, returns, mask, clip=0.3, denominators=counts)
    batch = {"mask": mask, "values": before, "returns": returns, "value_weights": token_weights(mask, cu_seqlens, "token", None, counts)}
    total, stats = CriticLoss(0.3)({"values": others}, batch)
    (loss + total).backward()
    assert total.item() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(others.grad, values.grad)
    assert stats["clipped"].item() / counts.tokens == pytest.approx(expected["clip_frac"].item()) and stats["clipped"] > 0


@pytest.mark.parametrize(("value", "target", "loss", "clipped"), [(1.0, 0.0, 0.5, 0), (0.5, 1.0, 0.32, 1)])
def test_critic_loss_with_clip(value, target, loss, clipped):
    values = torch.tensor([value, NAN], requires_grad=True)
    batch = {
        "mask": torch.tensor([True, False]),
        "returns": torch.tensor([target, NAN]),
        "values": torch.tensor([0.0, NAN]),
        "value_weights": torch.tensor([1.0, 0.0]),
    }
    total, stats = CriticLoss(0.2)({"values": values}, batch)
    total.backward()
    assert total.item() == pytest.approx(loss, abs=1e-6)
    assert (stats["clipped"].item(), stats["tokens"].item()) == (clipped, 1)
    assert math.isfinite(values.grad[0])
    assert values.grad[1] == 0.0


def test_critic_loss_is_a_weighted_sum_and_reads_no_old_values_without_clip():
    loss = CriticLoss(None)
    assert loss.tensors == ("returns", "value_weights")
    batch = {
        "mask": torch.tensor([True, True]),
        "returns": torch.tensor([1.0, 0.0]),
        "value_weights": torch.tensor([0.25, 0.25]),
    }
    total, _ = loss({"values": torch.tensor([0.0, 2.0])}, batch)
    assert total.item() == pytest.approx((0.5 * 1 + 0.5 * 4) / 4)


def test_critic_loss_of_a_categorical_head():
    """Cross-entropy of the logits, weighted; the squared error of the expectation beside it."""
    bins = ValueBins(-0.5, 1.5, 4, 0.75)
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0], [NAN] * 4], requires_grad=True)
    batch = {
        "mask": torch.tensor([True, False]),
        "returns": torch.tensor([0.25, NAN]),
        "value_weights": torch.tensor([0.5, 0.0]),
    }
    loss = CriticLoss(None, bins)
    assert loss.tensors == ("returns", "value_weights")
    total, stats = loss({"values": torch.tensor([0.75, NAN]), "value_logits": logits}, batch)
    total.backward()
    normal = NormalDist(0.25, 0.375)
    masses = [normal.cdf(right) - normal.cdf(right - 0.5) for right in (0.0, 0.5, 1.0, 1.5)]
    norm = math.log(sum(math.exp(x) for x in (0, 1, 2, 0)))
    expected = -sum(mass / sum(masses) * (x - norm) for mass, x in zip(masses, (0, 1, 2, 0), strict=True))
    assert total.item() == pytest.approx(0.5 * expected, abs=1e-6)
    assert stats["squared"].item() == pytest.approx(0.5 * 0.5 * 0.25)
    assert not logits.grad[1].any() and logits.grad[0].any()


def test_supervised_loss_is_the_weighted_nll():
    logprobs = torch.tensor([-1.0, -3.0, NAN], requires_grad=True)
    batch = {"mask": torch.tensor([True, True, False]), "loss_weights": torch.tensor([0.5, 0.5, 0.0])}
    total, stats = SupervisedLoss()({"logprobs": logprobs}, batch)
    total.backward()
    assert total.item() == 2.0
    assert (stats["nll"].item(), stats["tokens"].item()) == (4.0, 2)
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0]
