"""Confidence interval of an accuracy."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_interval(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a binomial proportion (Wilson 1927, JASA 22, 209-212; without continuity correction).

    With p = successes / trials and z the normal quantile, centre (p + z^2/2n) / (1 + z^2/n) and half-width
    z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n). Unlike the normal approximation it stays inside [0, 1] and is not empty at 0 or 1.

    ``successes`` may be fractional: for avg@k it is the sum over problems of the mean of k verdicts and ``trials`` the number
    of problems. The k samples of a problem are not independent, so a problem counts as one trial; as the variance of a mean of
    verdicts is at most that of one verdict, the interval is then at least as wide as needed.

    Raises:
        ValueError: no trials, or successes outside [0, trials].
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials are not a proportion")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    proportion, z2 = successes / trials, z * z
    centre = (proportion + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z * math.sqrt(proportion * (1 - proportion) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
