"""Measure the seconds of a step's phases, and the time and GPU-hours of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vapo_mcore import heartbeat


class PhaseTimer:
    """Sums wall-clock seconds by phase. With CUDA a phase ends with a device synchronisation, so it includes its kernels."""

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
        """Seconds since the timer was created."""
        return time.perf_counter() - self._start


class RunClock:
    """Measures wall-clock time and GPU-hours of a run since its models were built, including the time before a resume."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._start = time.perf_counter()
        self._earlier = {"seconds": 0.0, "gpu_seconds": 0.0}

    def metrics(self) -> dict[str, float]:
        """Return time and GPU-hours so far. GPU-hours are summed over all processes; a process without GPU counts as one GPU."""
        state = self.state_dict()
        return {"time/run": state["seconds"], "time/gpu_hours": state["gpu_seconds"] / 3600}

    def state_dict(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._start
        return {
            "seconds": self._earlier["seconds"] + seconds,
            "gpu_seconds": self._earlier["gpu_seconds"] + seconds * self.processes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, starting now."""
        self._start, self._earlier = time.perf_counter(), dict(state)
