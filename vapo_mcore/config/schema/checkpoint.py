"""Checkpoints of the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vapo_mcore.config.schema.base import NonNegativeInt, PositiveInt, Section


class CheckpointConfig(Section):
    """When and how checkpoints are saved (in ``checkpoints/`` of the run directory) and kept. SIGTERM and SIGUSR1 always save."""

    every_steps: NonNegativeInt = 0  # steps of either stage between saves; 0: not by steps
    every_minutes: Annotated[float, Field(ge=0, le=100_000)] = 30.0  # minutes since the start of the last save; 0: not by time
    at_end: bool = False  # save after the last step, so that a longer run can continue from it
    keep_last: PositiveInt = 2  # number of newest checkpoints to keep; the newest that loads at any layout is always kept, too
    keep_best: NonNegativeInt = 0  # number of further checkpoints to keep, those with the highest best_metric
    best_metric: str | None = None  # a metric of the steps, higher is better, such as reward/mean or eval/NAME/avg@1
    asynchronous: bool = True  # a thread writes a host copy while training continues; false: training waits
    # Every N-th save, and the last one, gathers the optimizer state, so that it loads at any TP, PP, CP and DP; the others require the same
    # TP and PP. 0: never gather.
    reshardable_every: NonNegativeInt = 10
