"""Handle SIGTERM and SIGUSR1 (Slurm's warning): the first requests a stop with a checkpoint, the second ends the process at once.

Python runs signal handlers between two bytecodes of the main thread, which may block in a collective for minutes. So the handler does
nothing: the interpreter's C code writes each signal to a wakeup pipe on arrival, and a thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Context manager that calls ``stop(signal name)`` on the first signal and exits with 128 + signal on the second.

    ``say`` prints a line for the user. Leaving the context restores the previous handlers.
    """

    def __init__(self, stop: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.stop = stop
        self.say = say
        self._previous: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._previous_wakeup = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._pipe[0], True)
        self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _ignore) for number in STOP_SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._pipe[1])
        assert self._thread is not None
        self._thread.join()
        os.close(self._pipe[0])

    def _watch(self) -> None:
        seen = 0
        while data := os.read(self._pipe[0], 1):
            if data[0] not in STOP_SIGNALS:
                continue
            seen += 1
            if seen > 1:
                os._exit(128 + data[0])
            name = signal.Signals(data[0]).name
            self.stop(name)
            self.say(f"{name}: stopping after this step with a checkpoint; a second signal ends the run at once")


def _ignore(_number: int, _frame: Any) -> None:
    """Do nothing. The interpreter writes a signal to the wakeup pipe only if a Python handler is installed."""
