"""Stopping a run between two steps: whoever finds a reason asks for it, all ranks agree after the step, a checkpoint comes first.

Three ways to end a run early, for everything that may want to:

- ``trainer.stop_requests.request(reason, exit_code=...)``: the present step is finished, a checkpoint is saved, the run ends. May be
  called on any rank at any time, from a signal handler too.
- raise ``StepAbandoned`` on all ranks before the step has changed a model (generation cannot recover): the checkpoint is that of the
  step before, so that a resumed run does this step again.
- raise any other error: the run ends as it is; what was saved before stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from vapo_mcore.collectives import all_gather_objects


@dataclass(frozen=True)
class StopRequest:
    """Why the run shall stop, and the exit code of its processes."""

    reason: str
    exit_code: int


class StopRequests:
    """Collects wishes to stop on this rank; ``agreed`` makes one decision of all ranks' wishes."""

    def __init__(self) -> None:
        self._wish: StopRequest | None = None

    def request(self, reason: str, *, exit_code: int) -> None:
        """Ask for a stop after the present step, with a checkpoint. The first reason of a rank stays."""
        if self._wish is None:
            self._wish = StopRequest(reason, exit_code)

    def agreed(self) -> StopRequest | None:
        """The wish of the lowest rank that has one, on every rank; a collective over all ranks."""
        return next((wish for wish in all_gather_objects(self._wish) if wish is not None), None)
