"""State and result of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vapo_mcore.checkpoint_files import Stage
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import Round
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.records.timing import PhaseTimer

Row = dict[str, Any]


@dataclass
class StepOutcome:
    """Result of a step.

    ``row``: reduced metrics. ``samples``: responses to write to the samples file, on all ranks; only rank 0 has their tokens.
    ``warnings``: findings of the diagnosis, one sentence each.
    """

    row: Row
    samples: list[dict[str, Any]]
    warnings: list[str]


@dataclass
class StepState:
    """State of a step under way."""

    stage: Stage
    number: int
    metrics: StepMetrics
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    samples: dict[int, dict[str, Any]] = field(default_factory=dict)  # by row
    updates_stopped: bool = False  # too many consecutive updates were skipped: no further update in this step
    sampled: tuple[Round, SamplingCounts] | None = None  # the step's rollout, kept for a dump
    dumped: bool = False
    ended: Experience | None = None  # with horizon.critic: ended, these responses with all their tokens

    def of_critic(self, experience: Experience) -> Experience:
        """Return what the critic trains on, if the policy trains on ``experience``."""
        return experience if self.ended is None else self.ended
