"""Checkpoints of the run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vapo_mcore.config.schema.base import NonNegativeInt, PositiveInt, Section


class CheckpointConfig(Section):
    """When the run is saved (to ``checkpoints/`` of the run directory), how, and what is kept. SIGTERM and SIGUSR1 always save."""

    every_steps: NonNegativeInt = 0  # of both stages; 0: not by steps
    every_minutes: Annotated[float, Field(ge=0, le=100_000)] = 30.0  # since the last save began; 0: not by time
    at_end: bool = False  # after the last step: a run with more steps can go on from there
    keep_last: PositiveInt = 2  # newest checkpoints that are kept
    keep_best: NonNegativeInt = 0  # and this many with the highest best_metric
    best_metric: str | None = None  # a metric of the steps, higher is better, such as reward/mean or eval/NAME/avg@1
    asynchronous: bool = True  # written by a thread from a copy in host memory while training goes on; false: training waits
    # Each N-th save, and the one at the end, holds optimizer state that loads at any TP, PP, CP and DP (it is gathered for that);
    # the others load where TP and PP are the same. 0: none.
    reshardable_every: NonNegativeInt = 10
