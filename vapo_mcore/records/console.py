"""Print a run's progress on rank 0: one line per step, a progress bar on terminals, and the summary."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PHASES = (
    ("time/generate", "gen"),
    ("time/reward", "reward"),
    ("time/logprobs", "logp"),
    ("time/values", "values"),
    ("time/critic_update", "critic"),
    ("time/policy_update", "policy"),
    ("time/weight_sync", "sync"),
)
_RL_FIELDS = (
    ("reward/mean", "reward", "{:.3f}"),
    ("accuracy/mean", "acc", "{:.3f}"),
    ("response/length_mean", "len", "{:.1f}"),
    ("policy/entropy", "H", "{:.3f}"),
    ("policy/approx_kl", "kl", "{:.1e}"),
    ("policy/clip_frac_high", "clip+", "{:.3f}"),
    ("policy/clip_frac_low", "clip-", "{:.3f}"),
    ("policy/grad_norm", "|g|", "{:.2f}"),
    ("critic/loss", "vloss", "{:.4f}"),
    ("critic/explained_variance_mc", "ev", "{:.2f}"),
    ("critic/grad_norm", "|gV|", "{:.2f}"),
    ("tokens/per_second", "tok/s", "{:.0f}"),
)

WAITING_SECONDS = 10.0
"""Interval of progress lines during the start of a run."""


@contextmanager
def waiting(activity: str, say: Callable[[str], None]) -> Iterator[None]:
    """Call ``say`` with ``activity`` and its elapsed time every ``WAITING_SECONDS`` until the block ends."""
    ended, begin = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not ended.wait(WAITING_SECONDS):
            say(f"{activity}: {time.monotonic() - begin:.0f} s")

    thread = threading.Thread(target=repeat, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def format_step(row: Mapping[str, Any], total: int) -> str:
    """Format one step as one line. Metrics that the step did not measure are omitted; undefined values are printed as a dash."""
    stage = "value pretraining" if row.get("stage") == "value_pretraining" else "step"
    parts = [f"{stage} {row['step']}/{total}"]
    for key, label, form in _RL_FIELDS:
        if key in row:
            parts.append(f"{label} {'-' if row[key] is None else form.format(row[key])}")
    seconds = " ".join(f"{label} {row[key]:.1f}" for key, label in _PHASES if row.get(key) is not None)
    parts.append(f"{row['time/step']:.1f}s ({seconds})")
    return " | ".join(parts)


class Console:
    """Prints lines and a progress bar if ``enabled``, else does nothing. Enable it on rank 0 only."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._rich = RichConsole(file=sys.stdout, soft_wrap=True, highlight=False, markup=False) if enabled else None
        self._progress: Progress | None = None
        self._task: Any = None

    def print(self, text: str) -> None:
        if self._rich is not None:
            self._rich.print(text)
            self._rich.file.flush()

    @contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        """Print ``activity`` and its elapsed time every ``WAITING_SECONDS`` until the block ends."""
        with waiting(activity, self.print) if self.enabled else nullcontext():
            yield

    def start_progress(self, description: str, total: int) -> None:
        """Show a progress bar for ``total`` steps if stdout is a terminal."""
        self.stop_progress()
        if self._rich is None or not self._rich.is_terminal:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._rich, transient=True)
        self._task = self._progress.add_task(description, total=total)
        self._progress.start()

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    def stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
