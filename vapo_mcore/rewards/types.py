"""What goes into a verifier pool and what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vapo_mcore.config.verifiers import Cause


class UngradableError(ValueError):
    """A verifier raises this if the ground truth (or the metadata) is such that no response could be judged by it."""


@dataclass(frozen=True)
class StepReward:
    """The reward of one step of a response, which ends after ``end`` characters of it; given to the token that completes the step."""

    end: int
    reward: float


@dataclass(frozen=True)
class StepScores:
    """What a verifier may return in place of a number: the score of the whole response, and rewards of its steps.

    ``steps`` are in the order of the response, ``end`` rising from 1 to the response's length at most; rewards are finite.
    """

    score: float
    steps: Sequence[StepReward] = ()

    def fault(self, response: str) -> str | None:
        """What is wrong with the steps, or None."""
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
        verifier: name of a built-in verifier (``math``, ``exact``, ...) or a reference to a function of the user's.
        response: the whole text that the model produced; of a response of several turns, the turns' texts, a line break between them.
        ground_truth: the right answer, as the data file gives it.
        metadata: further columns of the data row that the verifier may need (``choices``, a reasoning-gym entry, ...);
            in training and evaluation also the response's sampling seed (``environments.SAMPLE_SEED``) and how many characters
            precede the region where its answer counts (``environments.ANSWER_START``).
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
        steps: rewards of the response's steps, from verifiers that give them.
        cause: the kind of ``error``, by which such responses are counted; None where ``error`` is None.
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
