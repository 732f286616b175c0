"""Reductions of step metrics against hand-computed values, and what must not be possible."""

import math

import pytest
import torch

from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import Metric, Reduction, StepMetrics

TABLE = (
    Metric("mean", Reduction.MEAN, "tokens", ""),
    Metric("std", Reduction.STD, "tokens", ""),
    Metric("max", Reduction.MAX, "tokens", ""),
    Metric("min", Reduction.MIN, "tokens", ""),
    Metric("same", Reduction.REPLICATED, "rows", ""),
)


def test_a_mean_is_the_sum_over_the_count_and_not_a_mean_of_means():
    metrics = StepMetrics(TABLE)
    metrics.add("mean", 2.0, 2)  # two tokens of 1
    metrics.add("mean", torch.tensor(0.0), 8)  # eight tokens of 0
    assert metrics.reduce(None)["mean"] == pytest.approx(0.2)


def test_extremes_are_not_summed_over_microbatches():
    metrics = StepMetrics(TABLE)
    for part in ([3.0, -5.0], [4.0, -1.0]):
        values = torch.tensor(part)
        metrics.add_tokens("max", values, torch.tensor([True, True]))
        metrics.add_tokens("min", values, torch.tensor([True, True]))
    reduced = metrics.reduce(None)
    assert (reduced["max"], reduced["min"]) == (4.0, -5.0)


def test_masked_entries_are_never_read():
    metrics = StepMetrics(TABLE)
    values, mask = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True])
    for name in ("mean", "std", "max", "min"):
        metrics.add_tokens(name, values, mask)
    reduced = metrics.reduce(None)
    assert reduced["mean"] == 2.0
    assert reduced["std"] == 1.0
    assert (reduced["max"], reduced["min"]) == (3.0, 1.0)


def test_nothing_recorded_is_absent_and_a_mean_over_nothing_is_none():
    metrics = StepMetrics(TABLE)
    metrics.add_tokens("mean", torch.tensor([1.0]), torch.tensor([False]))
    metrics.add_tokens("max", torch.tensor([1.0]), torch.tensor([False]))
    assert metrics.reduce(None) == {"mean": None}


def test_token_counts_are_exact_beyond_float32():
    metrics = StepMetrics(TABLE)
    for _ in range(512):
        metrics.add("mean", torch.tensor(33_001), 1)
    metrics.add("mean", 1, 0)
    assert metrics.reduce(None)["mean"] == (512 * 33_001 + 1) / 512


def test_a_metric_cannot_be_recorded_against_its_declaration():
    metrics = StepMetrics(TABLE)
    with pytest.raises(KeyError):
        metrics.add("unknown", 1.0)
    with pytest.raises(ValueError, match="takes 2 slots"):
        metrics.add("mean", 1.0)
    with pytest.raises(ValueError, match="must be reduced"):
        metrics.put("mean", 1.0)
    with pytest.raises(ValueError, match="not an extreme"):
        metrics.extreme("mean", 1.0)


CANONICAL = [
    "step",
    "reward/mean",
    "accuracy/mean",
    "response/length_mean",
    "response/truncated_frac",
    "policy/loss",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_frac_high",
    "policy/clip_frac_low",
    "policy/grad_norm",
    "policy/lr",
    "policy/nll_loss",
    "critic/loss",
    "critic/explained_variance",
    "critic/grad_norm",
    "critic/values_mean",
    "critic/returns_mean",
    "gae/lambda_mean",
    "mismatch/logprob_abs_mean",
    "mismatch/kl",
    "tokens/response",
    "tokens/total",
    "time/step",
    "time/generate",
    "time/reward",
    "time/logprobs",
    "time/values",
    "time/critic_update",
    "time/policy_update",
    "time/weight_sync",
    "stage",
]


def test_the_table_has_every_canonical_key_once():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert set(CANONICAL) <= set(names)
    assert any(name.startswith("memory/") for name in names)
