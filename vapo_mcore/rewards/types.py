"""Inputs and outputs of the verifier pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vapo_mcore.config.verifiers import Cause


class UngradableError(ValueError):
    """Raised by a verifier if the ground truth (or the metadata) is invalid, so that no response can be graded."""


@dataclass(frozen=True)
class StepReward:
    """Reward of one step of a response, which ends after ``end`` characters; placed on the token that completes the step."""

    end: int
    reward: float


@dataclass(frozen=True)
class StepScores:
    """Alternative return value of a verifier: the score of the whole response, and rewards of its steps.

    ``steps`` are in order, with strictly increasing ``end`` between 1 and the response's length; rewards are finite.
    """

    score: float
    steps: Sequence[StepReward] = ()

    def fault(self, response: str) -> str | None:
        """Return a description of the first invalid step, or None."""
        before = 0
        for step in self.steps:
            if not isinstance(step, StepReward):
                return f"the step {step!r}, must be a StepReward"
            if not before < step.end <= len(response):
                return f"a step that ends at character {step.end} of {len(response)}, after one that ended at {before}: ends must rise"
            if not math.isfinite(step.reward):
                return f"the step reward {step.reward}, must be a finite number"
            before = step.end
        return None


@dataclass(frozen=True)
class GradeItem:
    """One response to grade.

    Attributes:
        verifier: name of a built-in verifier (``math``, ``exact``, ...) or a reference to a user-defined function.
        response: the whole text that the model produced; the turns of a multi-turn response are joined by line breaks.
        ground_truth: the right answer, as in the data file.
        metadata: further columns of the data row (``choices``, a reasoning-gym entry, ...); in training and evaluation also the
            response's sampling seed (``environments.SAMPLE_SEED``) and the number of characters before the region where its
            answer counts (``environments.ANSWER_START``).
    """

    verifier: str
    response: str
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The outcome of grading one response.

    Attributes:
        score: the verifier's score; 0.0 if ``error`` is set.
        correct: whether ``score`` reaches the pool's threshold; False if ``error`` is set.
        error: why there is no verdict (time-out, crash, exception, a score that is not a number, an unreadable ground truth), else
            None. A response with an error must be excluded from training, because its score is meaningless.
        seconds: time spent in the verifier, without waiting; 0.0 if the verdict was cached.
        steps: rewards of the response's steps, if the verifier returns them.
        cause: category of ``error``, for counting; None if ``error`` is None.
    """

    score: float
    correct: bool
    error: str | None
    seconds: float
    steps: tuple[StepReward, ...] = ()
    cause: Cause | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != (self.cause is None):
            raise ValueError(f"a verdict has an error with its cause, or neither: {self.error!r}, {self.cause!r}")


@dataclass
class PoolStats:
    """Counters since the pool was created. ``graded + cached + errors`` is the number of responses submitted.

    Attributes:
        graded: responses scored by a verifier.
        cached: responses whose answer was graded before, or earlier in the same call.
        errors: responses without a verdict, including ``timeouts`` and ``crashes``.
        timeouts: responses whose grading exceeded the time limit.
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
