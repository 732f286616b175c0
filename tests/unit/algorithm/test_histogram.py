"""The categorical value head (HL-Gauss) against its definition in float64: targets, loss and gradient, value, bounds, starting bias."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from vapo_mcore.algorithm.histogram import bias_of_mean, centres, expected_values, gaussian_histogram, histogram_value_terms, outside
from vapo_mcore.config.architecture import ValueBins

BINS = ValueBins(low=-0.3, high=1.5, bins=12, sigma=0.75)
RETURNS = (0.0, 1.0, 0.37, -0.3, 1.5, -2.0, 9.0)


def by_hand(value: float) -> list[float]:
    """Mass of N(value, sigma) in each bin, of what lies in all bins (arXiv:2403.03950, section 3.1)."""
    width = (BINS.high - BINS.low) / BINS.bins
    normal = NormalDist(min(max(value, BINS.low), BINS.high), BINS.sigma * width)
    masses = [normal.cdf(BINS.low + (k + 1) * width) - normal.cdf(BINS.low + k * width) for k in range(BINS.bins)]
    return [mass / sum(masses) for mass in masses]


def test_targets_are_the_masses_of_a_gaussian() -> None:
    found = gaussian_histogram(torch.tensor(RETURNS), BINS)
    expected = torch.tensor([by_hand(value) for value in RETURNS], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-7)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(RETURNS)))


def test_a_return_inside_is_the_expectation_of_its_target() -> None:
    """Three sigma from the bounds; at a bound the target is cut and its mean moves inwards, as the setting's description says."""
    found = gaussian_histogram(torch.tensor([0.0, 1.0, 0.37]), BINS).log()
    torch.testing.assert_close(expected_values(found, BINS), torch.tensor([0.0, 1.0, 0.37]), rtol=0, atol=2e-3)
    assert float(expected_values(gaussian_histogram(torch.tensor([-0.3]), BINS).log(), BINS)) > -0.3 + 0.05


def test_loss_and_gradient_are_the_cross_entropy_s() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(RETURNS), BINS.bins, generator=generator)
    returns, mask = torch.tensor(RETURNS), torch.tensor([True, False, True, True, False, True, True])
    logits[1], returns[4] = math.nan, math.nan
    given = logits.clone().requires_grad_()
    terms = histogram_value_terms(given, returns, mask, BINS)
    terms.sum().backward()
    assert given.grad is not None
    for row in range(len(RETURNS)):
        value, slope = 0.0, torch.zeros(BINS.bins, dtype=torch.float64)
        if mask[row]:
            target = torch.tensor(by_hand(RETURNS[row]), dtype=torch.float64)
            probabilities = logits[row].double().exp() / logits[row].double().exp().sum()
            value, slope = -float((target * probabilities.log()).sum()), probabilities - target
        assert float(terms[row].detach()) == pytest.approx(value, abs=1e-6)
        torch.testing.assert_close(given.grad[row].double(), slope, rtol=0, atol=1e-6)


def test_values_are_expectations() -> None:
    logits = torch.randn(5, BINS.bins, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    width = (BINS.high - BINS.low) / BINS.bins
    for row, value in zip(logits, expected_values(logits, BINS).tolist(), strict=True):
        weights = [math.exp(x) for x in row.tolist()]
        mean = sum(w * (BINS.low + (k + 0.5) * width) for k, w in enumerate(weights)) / sum(weights)
        assert value == pytest.approx(mean, abs=1e-6)
    assert expected_values(torch.zeros(1, BINS.bins), BINS).item() == pytest.approx((BINS.low + BINS.high) / 2, abs=1e-6)


def test_returns_outside_the_bounds_are_marked() -> None:
    mask = torch.tensor([True, True, True, True, True, True, False])
    assert outside(torch.tensor(RETURNS), mask, BINS).tolist() == [False, False, False, False, False, True, False]
    assert not outside(torch.tensor([BINS.low - 1e-7, BINS.high + 1e-7]), torch.ones(2, dtype=torch.bool), BINS).any()


@pytest.mark.parametrize("mean", [-0.1, 0.6, 1.3])
def test_a_head_of_zeros_starts_at_the_mean(mean: float) -> None:
    bias = bias_of_mean(mean, BINS)
    assert expected_values(bias[None], BINS).item() == pytest.approx(mean, abs=1e-5)
    assert torch.isfinite(bias).all() and float(bias.softmax(0).min()) > 0


@pytest.mark.parametrize("mean", [-9.0, 9.0])
def test_a_mean_beyond_the_bins_is_moved_into_them(mean: float) -> None:
    value = expected_values(bias_of_mean(mean, BINS)[None], BINS).item()
    edge = float(centres(BINS)[0 if mean < 0 else -1])
    assert value == pytest.approx(edge, abs=0.02 * (BINS.high - BINS.low))


def descend(logits: Tensor, target: float) -> Tensor:
    logits = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        histogram_value_terms(logits, torch.tensor([target]), torch.tensor([True]), BINS).sum().backward()
        optimizer.step()
    return logits.detach()


def test_minimising_the_loss_moves_the_value_to_the_return() -> None:
    assert expected_values(descend(torch.zeros(1, BINS.bins), 1.0), BINS).item() == pytest.approx(1.0, abs=5e-3)
