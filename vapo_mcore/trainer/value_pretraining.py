"""When value pretraining ends: a number of steps, or thresholds that hold over a window (VC-PPO, arXiv 2503.01491; VAPO 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vapo_mcore.config.schema import ValuePretrainingConfig


class PretrainingEnd:
    """Decides after each pretraining step whether it was the last; from reduced metrics, so the same on all ranks."""

    def __init__(self, settings: ValuePretrainingConfig) -> None:
        self.settings = settings
        self.held = 0
        self.done = 0
        self.over = False

    @property
    def max_steps(self) -> int:
        return self.settings.max_steps

    def after(self, row: Mapping[str, Any]) -> bool:
        """Take one step's metrics; True if pretraining is over.

        With ``until``, every given threshold must hold in ``window`` steps in a row; an undefined metric holds nothing.
        """
        self.done += 1
        until = self.settings.until
        if until is not None:
            loss, explained = row.get("critic/loss"), row.get("critic/explained_variance")
            low_loss = until.value_loss_below is None or (loss is not None and loss < until.value_loss_below)
            explains = until.explained_variance_above is None or (explained is not None and explained > until.explained_variance_above)
            self.held = self.held + 1 if low_loss and explains else 0
            self.over = self.held >= until.window
        self.over = self.over or self.done >= self.max_steps
        return self.over

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held, "done": self.done, "over": self.over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held, self.done, self.over = state["held"], state["done"], state["over"]

    def describe(self) -> str:
        """How it ended, for the log."""
        until = self.settings.until
        if until is None:
            return f"value pretraining: {self.done} steps done"
        if self.held >= until.window:
            return f"value pretraining: thresholds held for {until.window} steps in a row, ended after {self.done}"
        return f"value pretraining: thresholds not held for {until.window} steps in a row within max_steps = {until.max_steps}; going on"
