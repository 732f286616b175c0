"""Decide when value pretraining ends.

Criteria: a number of steps, thresholds that hold over a window (VC-PPO, arXiv:2503.01491; VAPO 4.1), or early stopping on held-out
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vapo_mcore.config.schema import UntilConfig, ValuePretrainingConfig

PROBE = "critic/probe_explained_variance"


class PretrainingEnd:
    """Decides after each pretraining step whether pretraining is over. The metrics are reduced, so all ranks decide alike.

    ``held``: number of consecutive steps that met the thresholds. ``best``: highest explained variance of the probe. ``since_best``:
    steps since ``best`` last rose by at least ``min_rise``.
    """

    def __init__(self, settings: ValuePretrainingConfig) -> None:
        self.settings = settings
        self.held = 0
        self.done = 0
        self.over = False
        self.best: float | None = None
        self.since_best = 0

    @property
    def max_steps(self) -> int:
        return self.settings.max_steps

    def after(self, row: Mapping[str, Any]) -> bool:
        """Record one step's metrics and return whether pretraining is over.

        With ``until``, all given thresholds must hold in ``window`` consecutive steps. An undefined metric meets no threshold and does
        not count as a rise.
        """
        self.done += 1
        until = self.settings.until
        if until is not None:
            self.held = self.held + 1 if until.has_thresholds and _thresholds_hold(until, row) else 0
            self._update_best(until, row)
            self.over = (until.has_thresholds and self.held >= until.window) or self._patience_is_over
        self.over = self.over or self.done >= self.max_steps
        return self.over

    def _update_best(self, until: UntilConfig, row: Mapping[str, Any]) -> None:
        value = row.get(PROBE)
        if value is not None and (self.best is None or (value > self.best and value >= self.best + until.min_rise)):
            self.best, self.since_best = value, 0
        else:
            self.since_best += 1

    @property
    def _patience_is_over(self) -> bool:
        until = self.settings.until
        return until is not None and until.patience is not None and self.since_best >= until.patience

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held, "done": self.done, "over": self.over, "best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held, self.done, self.over = state["held"], state["done"], state["over"]
        self.best, self.since_best = state.get("best"), state.get("since_best", 0)  # missing in checkpoints of 0.1

    def describe(self) -> str:
        """Return a log sentence with the reason why pretraining ended."""
        until = self.settings.until
        if until is None:
            return f"value pretraining: {self.done} steps done"
        if until.has_thresholds and self.held >= until.window:
            return f"value pretraining: thresholds held for {until.window} consecutive steps, ended after {self.done} steps"
        if self._patience_is_over:
            best = "undefined" if self.best is None else f"best {self.best:.3f}"
            return (
                f"value pretraining: explained variance on held-out prompts ({best}) did not rise by {until.min_rise:g} in "
                f"{until.patience} steps, ended after {self.done} steps"
            )
        missing = (
            f"thresholds did not hold for {until.window} consecutive steps" if until.has_thresholds else "explained variance still rising"
        )
        return f"value pretraining: {missing} within max_steps = {until.max_steps}; continuing"


def _thresholds_hold(until: UntilConfig, row: Mapping[str, Any]) -> bool:
    loss = row.get("critic/loss")
    if until.value_loss_below is not None and (loss is None or loss >= until.value_loss_below):
        return False
    for limit, name in ((until.explained_variance_above, "critic/explained_variance"), (until.probe_explained_variance_above, PROBE)):
        value = row.get(name)
        if limit is not None and (value is None or value <= limit):
            return False
    return True
