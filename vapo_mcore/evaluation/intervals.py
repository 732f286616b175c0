"""Compute confidence intervals of a mean over problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2000
_INDICES_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over ``problems`` problems with its interval and the method of the interval."""

    value: float
    low: float
    high: float
    problems: int
    interval: Literal["bootstrap", "wilson"]


def estimate(values: npt.NDArray[np.float64], seed: int | list[int]) -> Estimate | None:
    """Return the mean of ``values`` (float64 ``[problems]``, in [0, 1]) with a 95 % interval; None without values.

    Percentile bootstrap over problems (Efron 1979), ``RESAMPLES`` draws with replacement from numpy's default generator seeded with
    ``seed``. It resamples problems, because the samples of a problem are not independent. If all values are equal, every resample is
    the same and the interval would be empty, although 0 of 7 solved problems do not show that the accuracy is 0; then Wilson's interval
    is used.
    """
    count = values.size
    if count == 0:
        return None
    mean = math.fsum(values.tolist()) / count
    if (values == values[0]).all():
        low, high = wilson_interval(min(float(values[0]) * count, count), count)
        return Estimate(mean, low, high, count, "wilson")
    generator, means = np.random.default_rng(seed), []
    for start in range(0, RESAMPLES, block := max(1, _INDICES_AT_ONCE // count)):
        drawn = generator.integers(0, count, size=(min(block, RESAMPLES - start), count))
        means.append(values[drawn].mean(axis=1))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), count, "bootstrap")


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Compute the Wilson score interval of a binomial proportion (Wilson 1927, JASA 22, 209-212; without continuity correction).

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
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    proportion, z2 = successes / trials, z * z
    centre = (proportion + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z * math.sqrt(proportion * (1 - proportion) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
