"""What the fake device objects to, and the synchronisations it counts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

FAULTS: list[str] = []
"""All faults of this process, those that cannot raise (found in destructors) included."""

SYNCS: Counter[tuple[str, str]] = Counter()
"""(kind, place in the code) -> how often the host has waited for the device.

Kinds: ``item`` (also ``bool``), ``to_host`` and ``to_device`` (blocking copies), ``shape`` (operators whose result's size depends on
values: ``nonzero``, indexing by a mask), ``synchronize``, ``barrier``, ``objects`` (collectives of Python objects).
"""


class FakeCudaError(RuntimeError):
    """What CUDA would raise, or would not notice and should."""


def fault(text: str) -> NoReturn:
    note(text)
    raise FakeCudaError(f"fake CUDA: {text}")


def note(text: str) -> None:
    """Record a fault without raising."""
    FAULTS.append(f"{text} @ {place()}")


def count_sync(kind: str) -> None:
    SYNCS[kind, place()] += 1


@contextmanager
def counted_syncs() -> Iterator[Counter[tuple[str, str]]]:
    """The synchronisations inside the block, filled in when it ends."""
    before, inside = SYNCS.copy(), Counter[tuple[str, str]]()
    yield inside
    inside.update(SYNCS - before)


def place() -> str:
    """file:line of the innermost frame in Megatron-Core, this project or a test, this package excluded."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            "/megatron/core/" in name or "/vapo_mcore/" in name or "/tests/" in name or "/benchmarks/" in name
        ) and "/tests/fake_cuda/" not in name:
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
