"""Length-adaptive and sigmoid lambda, and the statistics that are logged of them."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vapo_mcore.algorithm.lambdas import lambda_statistics, length_adaptive_lambda, sigmoid_lambda


@given(st.lists(st.integers(0, 100_000), max_size=20), st.floats(1e-3, 10))
def test_length_adaptive_lambda_is_clamped_and_solves_equation_4(lengths: list[int], alpha: float) -> None:
    for length, lam in zip(lengths, length_adaptive_lambda(torch.tensor(lengths, dtype=torch.int64), alpha).tolist(), strict=True):
        assert 0.0 <= lam < 1.0
        if alpha * length > 1.001:
            assert 1 / (1 - lam) == pytest.approx(alpha * length, rel=1e-6)
        elif alpha * length <= 1:
            assert lam == 0.0


@pytest.mark.parametrize("alpha", [0.0, -0.05, math.nan])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(torch.tensor([10]), alpha)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        length_adaptive_lambda(torch.tensor([-1]), 0.05)


def test_sigmoid_lambda_with_population_statistics() -> None:
    lengths = [100, 400, 2500]
    mean, std = statistics.fmean(lengths), statistics.pstdev(lengths)
    expected = [0.3 + 0.65 / (1 + math.exp(-(length - mean) / std)) for length in lengths]
    assert sigmoid_lambda(torch.tensor(lengths)).tolist() == pytest.approx(expected, abs=1e-12)
    # One rank's share, with the statistics of the whole batch given.
    assert sigmoid_lambda(torch.tensor(lengths[:1]), mean=mean, std=std).tolist() == pytest.approx(expected[:1], abs=1e-12)


def test_sigmoid_lambda_divides_by_at_least_one() -> None:
    assert sigmoid_lambda(torch.tensor([7, 7])).tolist() == pytest.approx([0.625, 0.625])
    assert sigmoid_lambda(torch.tensor([8]), mean=7.0, std=0.0).tolist() == pytest.approx([0.3 + 0.65 / (1 + math.exp(-1))])
    assert sigmoid_lambda(torch.zeros(0)).numel() == 0
    with pytest.raises(ValueError, match="lam_min"):
        sigmoid_lambda(torch.tensor([1]), 0.9, 0.3)


def test_lambda_statistics() -> None:
    got = lambda_statistics(torch.tensor([0.0, 0.0, 0.5, 1.0]))
    assert got == {"mean": 0.375, "min": 0.0, "max": 1.0, "zero_frac": 0.5, "histogram": [2, *[0] * 9, 1, *[0] * 8, 1]}
    assert lambda_statistics(torch.zeros(0)) == {"mean": 0.0, "min": 0.0, "max": 0.0, "zero_frac": 0.0, "histogram": [0] * 20}
