"""Rebuild a rollout engine that failed while it generated."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vapo_mcore.collectives import all_gather_objects, world
from vapo_mcore.errors import StepAbandoned, VapoError
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rollout.base import RolloutEngine

logger = logging.getLogger(__name__)


class EngineRecovery:
    """Rebuilds the rollout engine at most ``limit`` times (``faults.engine_rebuilds``) in the life of this process.

    Args:
        sync: loads the policy's current weights into the rebuilt engine and wakes it; a collective.
    """

    def __init__(self, engine: RolloutEngine, sync: Callable[[], object], limit: int) -> None:
        self.engine = engine
        self.sync = sync
        self.limit = limit
        self.rebuilds = 0

    def __call__(self, failures: dict[int, str], timer: PhaseTimer) -> None:
        """Rebuild the engine and load the policy's current weights. Collective over all ranks.

        ``failures`` maps ranks to error messages and is the same on all ranks. Raises StepAbandoned after too many failures, or if the
        engine cannot be rebuilt; the exit code is EXIT_REQUEUE if a new process can build one.
        """
        text = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
        if self.rebuilds >= self.limit:
            again = f" again, after {self.rebuilds} rebuilds (faults.engine_rebuilds = {self.limit})" if self.limit else ""
            raise StepAbandoned(f"the rollout engine failed{again}: {text}")
        self.rebuilds += 1
        if world()[0] == 0:
            logger.warning("the rollout engine failed; rebuilding it with the current weights (%s)", text)
        with timer.phase("engine_rebuild"):
            failure = None
            try:
                self.engine.rebuild()
            except VapoError as error:
                failure = str(error), error.exit_code
            rebuild_failures = [found for found in all_gather_objects(failure) if found is not None]
            if rebuild_failures:
                reason, exit_code = rebuild_failures[0]
                raise StepAbandoned(f"the rollout engine failed ({text}) and cannot be rebuilt: {reason}", exit_code)
            self.sync()
