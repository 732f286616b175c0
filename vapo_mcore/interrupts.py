"""Ctrl-C while libraries are imported.

``KeyboardInterrupt`` inside an import is no way to end: libraries catch it and import something else, or report an ImportError. So while
they are imported Ctrl-C ends the process at once, with one line and exit code 130.
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
    """Around imports of libraries that take seconds. Nothing is cleaned up at a Ctrl-C: nothing may be open that another run would miss."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    previous = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def tell_interrupted() -> None:
    """One line for the user: from the launcher, or the only process; the terminal sends Ctrl-C to all ranks."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        print("interrupted", file=sys.stderr, flush=True)


def _end(_number: int, _frame: object) -> None:
    tell_interrupted()
    os._exit(EXIT_INTERRUPTED)
