"""Seconds by phase of a step, and what a run has taken so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vapo_mcore import heartbeat


class PhaseTimer:
    """Adds up wall-clock seconds by phase name. On a GPU a phase ends when its kernels have ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with heartbeat.entering(name):
                yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        """Seconds since this timer was made."""
        return time.perf_counter() - self._start


class RunClock:
    """Wall-clock time and GPU-hours of a run since its models were built, those of the processes it was resumed from included."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._start = time.perf_counter()
        self._earlier = {"seconds": 0.0, "gpu_seconds": 0.0}

    def metrics(self) -> dict[str, float]:
        """The cost of what stands beside it in a row. GPU-hours: of all processes together; without GPUs each counts as one."""
        state = self.state_dict()
        return {"time/run": state["seconds"], "time/gpu_hours": state["gpu_seconds"] / 3600}

    def state_dict(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._start
        return {
            "seconds": self._earlier["seconds"] + seconds,
            "gpu_seconds": self._earlier["gpu_seconds"] + seconds * self.processes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, now."""
        self._start, self._earlier = time.perf_counter(), dict(state)
