"""Heartbeat of this process: the current phase, when it began, and when the process last made progress.

Long operations report progress: ``entering`` sets the phase, ``alive`` is called per micro-batch, rollout-engine step and tensor. Both are
a few assignments; ``launch/watchdog.py`` reads the heartbeat from a separate thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Heartbeat:
    """State of the process. ``step``: such as "rl 12", empty outside steps; ``since``: start of the phase; ``last``: last progress.

    Times are from the monotonic clock.
    """

    phase: str = "start"
    step: str = ""
    since: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.last

    def describe(self) -> str:
        return f"phase {self.phase} of {self.step}" if self.step else f"phase {self.phase}"


CURRENT = Heartbeat()


def alive() -> None:
    """Record progress."""
    CURRENT.last = time.monotonic()


def at_step(step: str) -> None:
    """Set the current step ("": none) and record progress."""
    CURRENT.step = step
    alive()


@contextmanager
def entering(phase: str) -> Iterator[None]:
    """Set the phase within the block and restore the previous one afterwards."""
    before = CURRENT.phase
    _enter(phase)
    try:
        yield
    finally:
        _enter(before)


def _enter(phase: str) -> None:
    CURRENT.phase = phase
    CURRENT.since = CURRENT.last = time.monotonic()
