"""A spawn context whose children never import the parent's main module.

Ordinary spawned children run the parent's ``__main__`` once more, under another name. Here that would pull torch,
Megatron and vLLM into each worker (seconds and gigabytes), or run an unguarded script a second time. Workers find all
that they need by importing :mod:`vapo_mcore.rewards`, so the main module is kept out of what they are told to load.
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
    """Stands in for ``__main__``: it has neither a file nor a spec, everything else is looked up in the real one."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__("__main__")
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(self._real, name)


@contextmanager
def _main_without_origin() -> Iterator[None]:
    """While a process starts, ``multiprocessing`` sees a main module that it has no means to load again.

    Other threads that look something up in ``__main__`` meanwhile still find it.
    """
    with _start_lock:
        real = sys.modules["__main__"]
        sys.modules["__main__"] = _MainWithoutOrigin(real)
        try:
            yield
        finally:
            sys.modules["__main__"] = real


class LightSpawnProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that leaves the parent's main module alone."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _main_without_origin():
            return multiprocessing.context.SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]


class LightSpawnContext(multiprocessing.context.SpawnContext):
    """``multiprocessing.get_context("spawn")``, but for :class:`LightSpawnProcess`."""

    Process = LightSpawnProcess  # type: ignore[assignment]
