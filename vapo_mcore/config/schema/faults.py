"""Handling of faults: bad updates, failing engines and graders, hangs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vapo_mcore.config.schema.base import NonNegativeInt, PositiveInt, Section


class LossSpikeConfig(Section):
    """Skips an update whose loss exceeds the median of the last losses by more than ``factor`` median absolute deviations."""

    factor: Annotated[float, Field(gt=1)]  # 20 tolerates normal variation
    window: Annotated[int, Field(ge=8, le=100_000)] = 64  # last losses of the same model; with fewer, no update is skipped


class FaultsConfig(Section):
    bad_updates_in_a_row: PositiveInt = (
        5  # consecutive skipped updates of a model after which the run saves checkpoint and batch, and stops
    )
    # End the run if no rank makes progress (a micro-batch, a step of the rollout engine, a loaded tensor) for this long; null: never.
    hang_minutes: Annotated[float, Field(gt=0, le=100_000)] | None = 20.0
    # Rebuilds of a rollout engine that fails while generating, per start of the run; then the run stops.
    engine_rebuilds: NonNegativeInt = 1
    # Consecutive replacements of graders that cannot be kept alive; the responses being graded get no verdict.
    grader_restarts: NonNegativeInt = 3
    loss_spike: LossSpikeConfig | None = None  # null: skip only updates whose loss or gradient is not finite
