"""Wilson score interval against published values and its defining equation."""

import math

import pytest

from vapo_mcore.evaluation.intervals import wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17, 857-872), Table I, method 3 (score, no continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_the_ends_solve_the_score_equation():
    low, high = wilson_interval(12.5, 40)  # fractional successes: means of k verdicts
    for end in (low, high):
        assert abs(12.5 / 40 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 40), rel=1e-6)


def test_all_right_stays_inside_and_is_not_empty():
    low, high = wilson_interval(30, 30)
    assert high == 1.0
    assert 0.8 < low < 1.0


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 4)])
def test_what_is_no_proportion_is_refused(successes, trials):
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(successes, trials)
