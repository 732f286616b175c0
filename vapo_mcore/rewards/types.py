"""What goes into a verifier pool and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class UngradableError(ValueError):
    """A verifier raises this if the ground truth (or the metadata) is such that no response could be judged by it."""


@dataclass(frozen=True)
class GradeItem:
    """One response to grade.

    Attributes:
        verifier: name of a built-in verifier (``math``, ``exact``, ...) or a reference to a function of the user's.
        response: the whole text that the model produced.
        ground_truth: the right answer, as the data file gives it.
        metadata: further columns of the data row that the verifier may need (``choices``, a reasoning-gym entry, ...).
    """

    verifier: str
    response: str
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The outcome of grading one response.

    Attributes:
        score: what the verifier returned; 0.0 if ``error`` is set.
        correct: ``score`` reaches the pool's threshold; always False if ``error`` is set.
        error: why there is no verdict (time-out, crash, an exception, a score that is not a number, a ground truth
            that cannot be read), else None. Such a response must be left out of training: its score means nothing.
        seconds: time spent in the verifier itself, without waiting; 0.0 if the verdict was known already.
    """

    score: float
    correct: bool
    error: str | None
    seconds: float


@dataclass
class PoolStats:
    """Counts since the pool was made. ``graded + cached + errors`` is the number of responses asked about.

    Attributes:
        graded: responses that a verifier gave a score.
        cached: responses whose answer had been graded before (or twice in the same call).
        errors: responses without a verdict, for whatever reason; ``timeouts`` and ``crashes`` are among them.
        timeouts: responses whose grading took longer than the time-out.
        crashes: responses whose grading ended the worker process.
        restarts: worker processes replaced.
        seconds: time spent inside verifiers, summed over workers.
    """

    graded: int = 0
    cached: int = 0
    errors: int = 0
    timeouts: int = 0
    crashes: int = 0
    restarts: int = 0
    seconds: float = 0.0
