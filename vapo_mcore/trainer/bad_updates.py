"""Updates that no rank makes: which losses are spikes, how many were skipped in a row, and the batch that the run stopped at.

Whether an update is made is one decision of all ranks (``megatron/optimizer.py``); what is counted here is therefore the same on
all of them.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from vapo_mcore.config.schema import FaultsConfig
from vapo_mcore.megatron.optimizer import Skipped


class UpdateGuard:
    """Judges the updates of one model, over the steps of a run."""

    def __init__(self, settings: FaultsConfig) -> None:
        self.spike = settings.loss_spike
        self.limit = settings.bad_updates_in_a_row
        self.in_a_row = 0
        self._losses: deque[float] = deque(maxlen=self.spike.window if self.spike is not None else 0)

    def is_spike(self, loss: float) -> bool:
        """Whether the loss lies above median + factor x median absolute deviation of the last ``window`` losses that were learned from.

        False without such a setting, before there are so many, and where they do not differ at all.
        """
        if self.spike is None or len(self._losses) < self.spike.window:
            return False
        middle = median(self._losses)
        deviation = median(abs(value - middle) for value in self._losses)
        return deviation > 0 and loss - middle > self.spike.factor * deviation

    def note(self, loss: float, skipped: Skipped | None) -> None:
        """Take down one update, made or skipped."""
        if skipped is None:
            self.in_a_row = 0
            self._losses.append(loss)
        else:
            self.in_a_row += 1

    @property
    def must_stop(self) -> bool:
        """Returns whether the limit of consecutive skipped updates is reached."""
        return self.in_a_row >= self.limit

    def state_dict(self) -> dict[str, Any]:
        """For exact resume: plain numbers."""
        return {"in_a_row": self.in_a_row, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Losses beyond a window that was made smaller since are forgotten, oldest first."""
        self.in_a_row = int(state["in_a_row"])
        self._losses.clear()
        self._losses.extend(float(value) for value in state["losses"])
