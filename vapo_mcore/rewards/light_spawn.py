"""Multiprocessing spawn context whose children do not import the parent's main module.

Spawned children normally import the parent's ``__main__`` again. For the graders that would load torch, Megatron and vLLM in each worker
(seconds and gigabytes), or run an unguarded script a second time. Workers only need :mod:`vapo_mcore.rewards`, so the main module is
omitted from the data that tells a child what to import.
"""

from __future__ import annotations

import multiprocessing.context
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_start_lock = threading.Lock()


class _MainWithoutOrigin(ModuleType):
    """Proxy of ``__main__`` without a file and a spec; other attributes are looked up in the real module."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__("__main__")
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._real, name)


@contextmanager
def _main_without_origin() -> Iterator[None]:
    """Hide the origin of the main module from ``multiprocessing`` while a process starts.

    Attribute lookups in ``__main__`` by other threads still work.
    """
    with _start_lock:
        real = sys.modules["__main__"]
        sys.modules["__main__"] = _MainWithoutOrigin(real)
        try:
            yield
        finally:
            sys.modules["__main__"] = real


class LightSpawnProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that does not import the parent's main module."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _main_without_origin():
            return multiprocessing.context.SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class LightSpawnContext(multiprocessing.context.SpawnContext):
    """``multiprocessing.get_context("spawn")`` with :class:`LightSpawnProcess`."""

    Process = LightSpawnProcess  # type: ignore[assignment]
