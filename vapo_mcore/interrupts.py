"""Make Ctrl-C end the process at once while libraries are imported, with one line and exit code 130.

A ``KeyboardInterrupt`` raised inside an import is unreliable: some libraries catch it and import a fallback, or raise an ImportError.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def importing() -> Iterator[None]:
    """Context manager for slow imports. Ctrl-C runs no cleanup, so hold no locks or partly written files inside."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    previous = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def report_interrupted() -> None:
    """Print "interrupted" once: only from the launcher or a single-process run, since the terminal sends Ctrl-C to all ranks."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        print("interrupted", file=sys.stderr, flush=True)


def _end(_number: int, _frame: object) -> None:
    report_interrupted()
    os._exit(EXIT_INTERRUPTED)
