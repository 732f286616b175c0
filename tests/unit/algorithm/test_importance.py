"""Correction weights and statistics of the gap between sampler and trainer."""

import math

import pytest
import torch

from vapo_mcore.algorithm.importance import importance_rejections, importance_weights, measure_mismatch

ONE = torch.tensor([0, 3])
ALL = torch.ones(3, dtype=torch.bool)


def test_scenario_9_truncated_importance_sampling() -> None:
    old, rollout = torch.tensor([0.1, 1.0, 3.0]).log(), torch.zeros(3)
    assert importance_weights(old, rollout, ALL, ONE, kind="token_truncate", cap=2.0).tolist() == pytest.approx([0.1, 1, 2])
    assert measure_mismatch(old, rollout, ALL, cap=2.0)["beyond_cap_frac"] == pytest.approx(1 / 3)


def test_scenario_9_icepop() -> None:
    old, rollout = torch.full((3,), -1.0), torch.tensor([-0.5, -3.5, -0.8])
    got = importance_weights(old, rollout, ALL, ONE, kind="token_mask", low=0.5, cap=5.0)
    assert got.tolist() == pytest.approx([0.6065, 0, 0.8187], abs=1e-4)


def test_sequence_mask_judges_the_geometric_mean_of_the_response() -> None:
    ratio = torch.tensor([1.5, 0.8, 4.0, 4.0, 0.1, 1.0, 99.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)  # means: sqrt(1.2), 4, sqrt(.1), nothing
    got = importance_weights(ratio.log(), torch.zeros(7), mask, torch.tensor([0, 2, 4, 6, 7]), kind="sequence_mask", low=0.5, cap=2.0)
    assert got.tolist() == pytest.approx([1.5, 0.8, 0, 0, 0, 0, 0])


def test_masked_importance_sampling_by_sequence_weighs_each_token_by_the_ratio_of_its_response() -> None:
    ratio = torch.tensor([1.5, 0.8, 4.0, 4.0, 0.1, 1.0, 99.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)  # products: 1.2, 16, 0.1, nothing
    bounds = torch.tensor([0, 2, 4, 6, 7])
    got = importance_weights(ratio.log(), torch.zeros(7), mask, bounds, kind="sequence_product_mask", low=0.5, cap=2.0)
    assert got.tolist() == pytest.approx([1.2, 1.2, 0, 0, 0, 0, 0]) and got.dtype == torch.float32
    counts = importance_rejections(ratio.log(), torch.zeros(7), mask, bounds, kind="sequence_product_mask", low=0.5, cap=2.0)
    assert counts == {
        "tokens": 6, "tokens_low": 2, "tokens_high": 2, "responses": 3, "responses_rejected": 2, "responses_lost": 2
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["off", "token_truncate", "token_mask", "sequence_mask", "sequence_product_mask"])
def test_masked_nan_and_equal_logprobs(kind: str) -> None:
    logprobs = torch.tensor([math.nan, -1.0, -2.0], requires_grad=True)
    mask = torch.tensor([False, True, True])
    got = importance_weights(logprobs, logprobs, mask, ONE, kind=kind)
    assert got.tolist() == [0, 1, 1] and not got.requires_grad


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="kind must be"):
        importance_weights(ALL.float(), ALL.float(), ALL, ONE, kind="tis")
    assert importance_weights(ALL.float(), ALL.float(), ALL, ONE, kind="token_truncate", cap=0.4).tolist() == pytest.approx([0.4] * 3)
    with pytest.raises(ValueError, match="cap must be above 0"):
        importance_weights(ALL.float(), ALL.float(), ALL, ONE, kind="token_truncate", cap=0.0)
    with pytest.raises(ValueError, match="low < cap"):
        importance_weights(ALL.float(), ALL.float(), ALL, ONE, kind="token_mask", low=2.0, cap=2.0)


def test_mismatch_statistics_by_hand() -> None:
    ratio = torch.tensor([0.25, 1.0, 4.0, 77.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    got = measure_mismatch(ratio.log(), torch.zeros(4, dtype=torch.float64), mask, cap=2.0)
    assert got == pytest.approx(
        {
            "logprob_abs_mean": 2 * math.log(4) / 3,
            "logprob_abs_max": math.log(4),
            "kl": ((0.25 - 1 + math.log(4)) + 0 + (4 - 1 - math.log(4))) / 3,
            "ess": 5.25**2 / (3 * (0.0625 + 1 + 16)),
            "beyond_cap_frac": 1 / 3,
        }
    )


def test_mismatch_of_equal_logprobs_and_of_nothing() -> None:
    equal = {
        "logprob_abs_mean": 0,
        "logprob_abs_max": 0,
        "kl": 0,
        "ess": 1,
        "beyond_cap_frac": 0,
    }
    assert measure_mismatch(-ALL.float(), -ALL.float(), ALL, cap=2.0) == equal
    assert measure_mismatch(torch.full((3,), math.nan), ALL.float(), ~ALL, cap=2.0) == equal
    assert measure_mismatch(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), cap=2.0) == equal
