"""Requests to environments and their replies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLE_SEED = "sample_seed"
"""Metadata key of the response's sampling seed, for environments and verifiers."""

ANSWER_START = "answer_region_start"
"""Key of the metadata under which verifiers find how many characters of the response precede the region where its answer counts."""

RIGHT_ANSWERS = "right_answers"
"""Key of the metadata under which verifiers find the answers of a row that has several, any of which is right."""

RESERVED = {
    SAMPLE_SEED: "the response's sampling seed",
    ANSWER_START: "where the response's answer counts",
    RIGHT_ANSWERS: "a row's several answers",
}
"""Names that the run itself gives to the metadata, which no column may have."""


def with_sample_seed(metadata: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Add the response's sampling seed (``rollout.seeds.sampling_seed``) to a row's metadata, as the source of randomness.

    All turns of the environment and the verifier of one response get the same seed; two responses to a prompt get different ones.
    """
    return {**metadata, SAMPLE_SEED: seed}


@dataclass(frozen=True)
class Observation:
    """An environment's reply to the newest turn.

    Attributes:
        text: text that the model reads next; None ends the response (like returning None instead of an Observation).
        reward: reward of the newest turn, placed on its last token; any finite number.
    """

    text: str | None
    reward: float = 0.0

    def fault(self) -> str | None:
        """Return a description of what is invalid, or None."""
        if self.text is not None and not isinstance(self.text, str):
            return f"an observation of type {type(self.text).__name__}, must be text or None"
        if not isinstance(self.reward, int | float) or not math.isfinite(self.reward):
            return f"the turn reward {self.reward!r}, must be a finite number"
        return None


@dataclass(frozen=True)
class TurnRequest:
    """A response whose newest turn has ended: the texts of its turns, the ground truth and the other columns of the prompt's row.

    During a rollout ``metadata`` also holds the response's sampling seed (``SAMPLE_SEED``).
    """

    turns: tuple[str, ...]
    ground_truth: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Result of a request: an observation, or the reason why there is none (time-out, crash, exception)."""

    observation: Observation
    error: str | None = None
