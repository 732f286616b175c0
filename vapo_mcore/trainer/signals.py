"""SIGTERM and SIGUSR1 (Slurm's warning): the first asks for a stop with a checkpoint, the second ends the process at once.

Python runs signal handlers between two instructions of the main thread, which may sit in a collective for minutes. The C part of the
interpreter writes each signal to a pipe when it arrives, and a thread reads it.
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
    """While entered, calls ``stop(name of the signal)`` once for the first signal; exits with 128 + signal at the second.

    ``say`` gets a line for people. Signals go back to what they were when it is left.
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
        self._previous = {number: signal.signal(number, _noted) for number in STOP_SIGNALS}
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


def _noted(_number: int, _frame: Any) -> None:
    """A handler must be there for the signal to be written to the pipe."""
