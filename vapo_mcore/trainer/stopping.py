"""Stop a run between two steps, with a checkpoint, when any rank requests it.

There are three ways to end a run early:

- ``trainer.stop_requests.request(reason, exit_code=...)`` completes the current step, saves a checkpoint and ends the run. It may be
  called on any rank at any time, also from a signal handler.
- Raising ``StepAbandoned`` on all ranks, before the step changed a model, checkpoints the previous step and ends the run. A resumed run
  repeats the abandoned step.
- Raising any other error ends the run at once; earlier checkpoints remain.
"""

from __future__ import annotations

from dataclasses import dataclass

from vapo_mcore.collectives import all_gather_objects


@dataclass(frozen=True)
class StopRequest:
    """Reason for stopping the run, and the exit code of its processes."""

    reason: str
    exit_code: int


class StopRequests:
    """Collects stop requests on this rank; ``agreed`` combines the requests of all ranks into one decision."""

    def __init__(self) -> None:
        self._request: StopRequest | None = None

    def request(self, reason: str, *, exit_code: int) -> None:
        """Request a stop after the current step, with a checkpoint. Only the first request of a rank counts."""
        if self._request is None:
            self._request = StopRequest(reason, exit_code)

    def agreed(self) -> StopRequest | None:
        """Return the request of the lowest rank that made one, or None; the same on every rank. Collective over all ranks."""
        return next((request for request in all_gather_objects(self._request) if request is not None), None)
