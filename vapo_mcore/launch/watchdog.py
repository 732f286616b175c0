"""Ends a run that hangs: a thread on every rank that watches the signs of life of all ranks.

<run.dir>/heartbeats/rank_0001.json    phase, step, since when, last sign of life; rewritten while the process lives
<run.dir>/heartbeats/rank_0001.stacks  stacks of all threads, if the run hung

A rank may well wait long for another one that is busy. So a rank counts as hung when it has shown no sign of life for the limit and
neither has any other rank; then every rank writes the stacks of all its threads and ends with ``EXIT_HANG``. The thread runs while
the main thread is in a collective or in other code that leaves the interpreter free; for code that does not, faulthandler's timer,
set anew as long as the thread runs, does the same without the interpreter, and can only end the process with exit code 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from vapo_mcore import heartbeat
from vapo_mcore.errors import EXIT_HANG, ConfigError
from vapo_mcore.launch.local import report_error

_TICK_SECONDS = 1.0
_REFRESHES = 20  # of a heartbeat file within the limit
_SHOWN = 8
_HUNG = "hung"  # file made by the rank that finds the run hung


def heartbeat_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "heartbeats"


def read_heartbeats(run_dir: str | Path) -> dict[int, dict[str, Any]]:
    """The ranks' files, as far as they can be read: what each was doing when it last wrote."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(heartbeat_folder(run_dir).glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict):
                found[int(path.stem.removeprefix("rank_"))] = record
    return found


def has_hung(run_dir: str | Path) -> bool:
    """Whether the watchdog ended the run when it was last started."""
    return (heartbeat_folder(run_dir) / _HUNG).exists()


class Watchdog:
    """Watches this process while the block runs; with ``None`` for a limit it does nothing.

    Args:
        limit_seconds: longest time without a sign of life of any rank.
        rank, world_size: of this process.
    """

    def __init__(self, limit_seconds: float | None, *, rank: int, world_size: int) -> None:
        self.limit = limit_seconds
        self._tick = _TICK_SECONDS if limit_seconds is None else min(_TICK_SECONDS, limit_seconds / 4)
        self.rank = rank
        self.world_size = world_size
        self._folder: Path | None = None
        self._stacks: IO[str] | None = None
        self._written: tuple[str, str, float] = ("", "", 0.0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.limit is not None:
            heartbeat.at_step("")
            self._arm()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The process ends by itself from here on; files of a run that did not hang are left, but no empty ones."""
        if self.limit is None:
            return
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._folder is not None and self._stacks is not None:
            with contextlib.suppress(OSError):
                self._write(force=True)
                self._stacks.close()
                if (path := self._path("stacks")).stat().st_size == 0:
                    path.unlink()

    def clear(self, run_dir: str | Path) -> None:
        """Make the folder, without what an earlier start of the run left in it; on one rank, before any rank attaches.

        Raises ConfigError where that cannot be done.
        """
        if self.limit is None:
            return
        folder = heartbeat_folder(run_dir)
        try:
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path.name == _HUNG or path.suffix in (".json", ".stacks"):
                    path.unlink()
        except OSError as error:
            raise ConfigError(f"run.dir: {str(folder)!r} cannot be written: {error}") from error

    def attach(self, run_dir: str | Path) -> None:
        """The run has its directory, cleared of old heartbeats: from now on ranks see each other's. Raises ConfigError where it cannot."""
        if self.limit is None:
            return
        folder = heartbeat_folder(run_dir)
        try:
            self._stacks = open(folder / f"rank_{self.rank:04d}.stacks", "w", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            raise ConfigError(
                f"run.dir = {str(run_dir)!r} cannot be written on {socket.gethostname()}: {error}; all nodes must see the same folder"
            ) from error
        self._folder = folder
        self._arm()

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        assert self.limit is not None
        while not self._done.wait(self._tick):
            self._arm()
            with contextlib.suppress(OSError):  # a file system that fails for a while is no hang; the next tick tries again
                self._write()
                if self._folder is not None and (self._folder / _HUNG).exists():
                    self._end(first=False)
            if heartbeat.CURRENT.idle > self.limit and self._others_are_idle():
                self._end(first=True)

    def _arm(self) -> None:
        """Set faulthandler's timer anew: it ends only if the thread cannot run for so long, which code that holds the interpreter keeps
        it from."""
        assert self.limit is not None
        faulthandler.dump_traceback_later(self.limit + 2 * self._tick, exit=True, file=self._stacks or sys.stderr)

    def _write(self, *, force: bool = False) -> None:
        """Rewrite this rank's file when phase or step changed, or it grows old."""
        now, current = time.time(), heartbeat.CURRENT
        assert self.limit is not None
        phase, step, at = self._written
        if self._folder is None or not (force or (phase, step) != (current.phase, current.step) or now - at > self.limit / _REFRESHES):
            return
        record = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": current.phase,
            "step": current.step,
            "since": now - (time.monotonic() - current.since),  # wall clock: other processes read it
            "last": now - current.idle,
            "written": now,
        }
        unfinished = self._folder / f".rank_{self.rank:04d}"
        unfinished.write_text(json.dumps(record) + "\n", encoding="utf-8")
        unfinished.rename(self._path("json"))
        self._written = (current.phase, current.step, now)

    def _path(self, ending: str) -> Path:
        assert self._folder is not None
        return self._folder / f"rank_{self.rank:04d}.{ending}"

    def _others(self) -> dict[int, dict[str, Any]]:
        """The other ranks' files, as far as they can be read."""
        found = {} if self._folder is None else read_heartbeats(self._folder.parent)
        return {rank: record for rank, record in found.items() if rank != self.rank and rank < self.world_size}

    def _others_are_idle(self) -> bool:
        """No other rank has shown a sign of life within the limit. A rank without a file has shown none."""
        assert self.limit is not None
        oldest = time.time() - self.limit
        return all(record["last"] < oldest for record in self._others().values())

    def _end(self, *, first: bool) -> None:
        """Write the stacks, tell the other ranks and the launcher, and end the process."""
        faulthandler.cancel_dump_traceback_later()
        current = heartbeat.CURRENT
        seconds = current.idle
        header = f"rank {self.rank} hangs: no sign of life for {seconds:.0f} s in {current.describe()}"
        for file in (self._stacks, sys.stderr if first else None):
            if file is not None:
                with contextlib.suppress(OSError):
                    print(header, file=file, flush=True)
                    faulthandler.dump_traceback(file=file, all_threads=True)
        if first:
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    (self._folder / _HUNG).touch()
            where = "" if self._folder is None else f"; stacks of all ranks: {self._folder}"
            told = f"no sign of life for {seconds:.0f} s in {current.describe()} (faults.hang_minutes){self._comparison()}{where}"
            report_error(told, EXIT_HANG)
        time.sleep(2 * self._tick)  # the launcher ends the other ranks when one is gone: they get the time to write theirs
        os._exit(EXIT_HANG)

    def _comparison(self) -> str:
        """What the other ranks are doing, for telling which one was the first to stop."""
        others = self._others()
        if not others:
            return ""
        last = {rank: float(record["last"]) for rank, record in others.items()} | {self.rank: time.time() - heartbeat.CURRENT.idle}
        stopped_first = min(last, key=lambda rank: last[rank])
        parts = [f"rank {rank}: {r['phase']}{' of ' + r['step'] if r['step'] else ''}" for rank, r in sorted(others.items())]
        more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
        return f"; the first to stop was rank {stopped_first}; {', '.join(parts[:_SHOWN])}{more}"
