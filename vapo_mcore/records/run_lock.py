"""Lock the run directory, so that at most one live run uses it. Rank 0 holds ``<run.dir>/.lock`` while the run lives.

The file contains host, process id and a counter that is incremented every few seconds. A POSIX record lock on the file, which the kernel
releases whenever the process ends, excludes processes of the same host, and of other hosts if the file system propagates locks. If it
does not, the counter decides: a holder on another host whose counter does not change is considered dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vapo_mcore.errors import ConfigError
from vapo_mcore.records.run_dir import LOCK_NAME

BEAT_SECONDS = 5.0
WATCH_SECONDS = 20.0


def lock_path(run_dir: str | Path) -> Path:
    return Path(run_dir) / LOCK_NAME


def lock_holder(run_dir: str | Path) -> dict[str, Any] | None:
    """Return the contents of the lock file: the live or dead holder of the run. None if the lock was released."""
    try:
        return _holder(lock_path(run_dir).read_bytes())
    except OSError:
        return None


def _holder(text: bytes) -> dict[str, Any] | None:
    """Parse the lock file; None if it names no holder."""
    try:
        content = json.loads(text)
    except ValueError:
        return {"host": "an unknown host", "pid": "?"} if text.strip() else None
    return content if isinstance(content, dict) else None


class RunLock:
    """Context manager that holds the lock. Entering raises ConfigError if a live run uses the directory.

    Args:
        run_dir: existing run directory.
        say: prints a line when the lock of a dead run is taken over.
        beat_seconds: interval at which the counter is incremented.
        watch_seconds: how long to watch the counter of a holder on another host.
    """

    def __init__(
        self, run_dir: str | Path, say: Callable[[str], None], *, beat_seconds: float = BEAT_SECONDS, watch_seconds: float = WATCH_SECONDS
    ) -> None:
        self.path = lock_path(run_dir)
        self.say = say
        self.beat_seconds, self.watch_seconds = beat_seconds, watch_seconds
        self._descriptor = -1
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _take(self) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(self._in_use(self._read())) from error
        holder = self._read()
        if holder is None:
            return
        here = socket.gethostname()
        if holder.get("host") != here:
            self.say(f"run.dir was last used on host {holder.get('host')}: checking for {self.watch_seconds:.0f} s if that run is alive")
            self._watch(holder)
        self.say(f"run.dir: process {holder.get('pid')} on {holder.get('host')} died without releasing its lock; taking it over")

    def _watch(self, holder: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.watch_seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.watch_seconds / 4))
            now = self._read()
            if now is not None and now != holder:
                raise ConfigError(self._in_use(now))

    def _in_use(self, holder: dict[str, Any] | None) -> str:
        who = "another process" if holder is None else f"process {holder.get('pid')} on host {holder.get('host')}"
        return f"run.dir = {str(self.path.parent)!r} is in use by a live run ({who}); end that run first, or choose another run.dir"

    def _read(self) -> dict[str, Any] | None:
        return _holder(os.pread(self._descriptor, 4096, 0))

    def _beat(self) -> None:
        count = 0
        while True:
            content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "beat": count}).encode()
            with contextlib.suppress(OSError):  # a full disk must not end the run; the record lock still holds
                os.pwrite(self._descriptor, content.ljust(256), 0)
            count += 1
            if self._ended.wait(self.beat_seconds):
                return
