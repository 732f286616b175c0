"""What a run does about faults: bad updates, failing engines and graders, hangs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vapo_mcore.config.schema.base import NonNegativeInt, PositiveInt, Section


class LossSpikeConfig(Section):
    """An update whose loss lies more than ``factor`` median absolute deviations above the median of the last ones is skipped."""

    factor: Annotated[float, Field(gt=1)]  # 20 lets through what training does by itself
    window: Annotated[int, Field(ge=8, le=100_000)] = 64  # of the same model's updates; no update is judged before this many


class FaultsConfig(Section):
    bad_updates_in_a_row: PositiveInt = 5  # skipped updates of a model after which the run stops, with a checkpoint and the batch
    # Without a sign of life of any rank (a micro-batch, a step of the rollout engine, a tensor loaded): the run is ended; null: never.
    hang_minutes: Annotated[float, Field(gt=0, le=100_000)] | None = 20.0
    engine_rebuilds: NonNegativeInt = 1  # of a rollout engine that fails while generating, in a start of the run; then the run stops
    grader_restarts: NonNegativeInt = 3  # in a row, of graders that cannot be kept alive; what they were grading has no verdict
    loss_spike: LossSpikeConfig | None = None  # null: only a loss or a gradient that is not finite is skipped
