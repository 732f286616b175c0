"""Signs of life of this process: what it is doing, since when, and when it last got on with it.

Whatever takes long says so: ``entering`` names the phase, ``alive`` is called for every micro-batch, every step of a rollout engine,
every tensor. All of it is an assignment or two; ``launch/watchdog.py`` reads it from a separate thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Heartbeat:
    """``step``: such as "rl 12", empty outside steps. ``since``: when the phase began; ``last``: the last sign of life; monotonic clock."""

    phase: str = "start"
    step: str = ""
    since: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.last

    def describe(self) -> str:
        return f"phase {self.phase} of {self.step}" if self.step else f"phase {self.phase}"


CURRENT = Heartbeat()


def alive() -> None:
    """Work is going on."""
    CURRENT.last = time.monotonic()


def at_step(step: str) -> None:
    """From now on this step, or none ("")."""
    CURRENT.step = step
    alive()


@contextmanager
def entering(phase: str) -> Iterator[None]:
    """The work inside is this phase; afterwards what was before."""
    before = CURRENT.phase
    _enter(phase)
    try:
        yield
    finally:
        _enter(before)


def _enter(phase: str) -> None:
    CURRENT.phase = phase
    CURRENT.since = CURRENT.last = time.monotonic()
