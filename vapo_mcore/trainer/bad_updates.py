"""Detect loss spikes and count consecutive skipped updates.

All ranks decide together whether an update is skipped (``megatron/optimizer.py``), so the counts here are the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from vapo_mcore.config.schema import FaultsConfig
from vapo_mcore.megatron.optimizer import Skipped


class UpdateGuard:
    """Tracks the losses and skipped updates of one model over the steps of a run."""

    def __init__(self, settings: FaultsConfig) -> None:
        self.spike = settings.loss_spike
        self.limit = settings.bad_updates_in_a_row
        self.in_a_row = 0
        self._losses: deque[float] = deque(maxlen=self.spike.window if self.spike is not None else 0)

    def is_spike(self, loss: float) -> bool:
        """Return whether the loss exceeds median + factor x median absolute deviation of the last ``window`` losses of applied updates.

        Returns False if ``faults.loss_spike`` is unset, if fewer than ``window`` losses are known, or if these are all equal.
        """
        if self.spike is None or len(self._losses) < self.spike.window:
            return False
        middle = median(self._losses)
        deviation = median(abs(value - middle) for value in self._losses)
        return deviation > 0 and loss - middle > self.spike.factor * deviation

    def note(self, loss: float, skipped: Skipped | None) -> None:
        """Record one update, applied or skipped."""
        if skipped is None:
            self.in_a_row = 0
            self._losses.append(loss)
        else:
            self.in_a_row += 1

    def reset(self) -> None:
        """Count from zero again; the losses stay."""
        self.in_a_row = 0

    @property
    def must_stop(self) -> bool:
        """Return whether the limit of consecutive skipped updates is reached."""
        return self.in_a_row >= self.limit

    def state_dict(self) -> dict[str, Any]:
        """Return the state for an exact resume; plain numbers only."""
        return {"in_a_row": self.in_a_row, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state. If the window became smaller, the oldest losses are dropped."""
        self.in_a_row = int(state["in_a_row"])
        self._losses.clear()
        self._losses.extend(float(value) for value in state["losses"])
