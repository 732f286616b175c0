"""Watchdog that ends a hung run: a thread on every rank monitors the heartbeats of all ranks.

<run.dir>/heartbeats/rank_0001.json    phase, step, start of the phase, last heartbeat; rewritten while the process is alive
<run.dir>/heartbeats/rank_0001.stacks  stacks of all threads, if the run hung

A rank may legitimately wait long for a busy one, so a run counts as hung only if no rank has had a heartbeat within the limit. Then every
rank writes the stacks of all its threads and exits with ``EXIT_HANG``. The thread runs while the main thread is in a collective or in
other code that releases the GIL. For code that holds the GIL, faulthandler's timer, which the thread keeps resetting, dumps the stacks
without the interpreter; it can only exit with code 1.
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
_REFRESHES = 20  # minimum rewrites of a heartbeat file within the limit
_SHOWN = 8
_HUNG = "hung"  # marker file created by the rank that detects the hang


def heartbeat_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "heartbeats"


def read_heartbeats(run_dir: str | Path) -> dict[int, dict[str, Any]]:
    """Return the readable heartbeat files, by rank: what each rank was doing when it last wrote."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(heartbeat_folder(run_dir).glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(record, dict):
                found[int(path.stem.removeprefix("rank_"))] = record
    return found


def has_hung(run_dir: str | Path) -> bool:
    """Return whether the watchdog ended the last start of the run."""
    return (heartbeat_folder(run_dir) / _HUNG).exists()


class Watchdog:
    """Context manager that watches this process; does nothing if the limit is None.

    Args:
        limit_seconds: maximum time without a heartbeat of any rank.
        rank, world_size: rank of this process and number of ranks.
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
        """Stop watching; keeps the heartbeat file and deletes an empty stacks file."""
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
        """Create the folder and delete the files of earlier starts. Call it on one rank, before any rank attaches.

        Raises ConfigError if that fails.
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
        """Start exchanging heartbeats in the run directory, after ``clear``. Raises ConfigError if it cannot be written."""
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
            with contextlib.suppress(OSError):  # a temporary file-system failure is not a hang; retry at the next tick
                self._write()
                if self._folder is not None and (self._folder / _HUNG).exists():
                    self._end(first=False)
            if heartbeat.CURRENT.idle > self.limit and self._others_are_idle():
                self._end(first=True)

    def _arm(self) -> None:
        """Reset faulthandler's timer, which expires only if this thread cannot run, that is, if other code holds the GIL."""
        assert self.limit is not None
        faulthandler.dump_traceback_later(self.limit + 2 * self._tick, exit=True, file=self._stacks or sys.stderr)

    def _write(self, *, force: bool = False) -> None:
        """Rewrite this rank's file if phase or step changed, or it is older than its refresh interval."""
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
        """Return the readable heartbeat files of the other ranks."""
        found = {} if self._folder is None else read_heartbeats(self._folder.parent)
        return {rank: record for rank, record in found.items() if rank != self.rank and rank < self.world_size}

    def _others_are_idle(self) -> bool:
        """Return whether no other rank had a heartbeat within the limit; ranks without a file count as idle."""
        assert self.limit is not None
        oldest = time.time() - self.limit
        return all(record["last"] < oldest for record in self._others().values())

    def _end(self, *, first: bool) -> None:
        """Write the stacks, notify the other ranks and the launcher, and exit."""
        faulthandler.cancel_dump_traceback_later()
        current = heartbeat.CURRENT
        seconds = current.idle
        header = f"rank {self.rank} hangs: no progress for {seconds:.0f} s in {current.describe()}"
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
            message = f"no progress for {seconds:.0f} s in {current.describe()} (faults.hang_minutes){self._comparison()}{where}"
            report_error(message, EXIT_HANG)
        time.sleep(2 * self._tick)  # the launcher kills the other ranks once one has ended: leave them time to write their stacks
        os._exit(EXIT_HANG)

    def _comparison(self) -> str:
        """Describe the other ranks' phases and which rank stopped first."""
        others = self._others()
        if not others:
            return ""
        last = {rank: float(record["last"]) for rank, record in others.items()} | {self.rank: time.time() - heartbeat.CURRENT.idle}
        stopped_first = min(last, key=lambda rank: last[rank])
        parts = [f"rank {rank}: {r['phase']}{' of ' + r['step'] if r['step'] else ''}" for rank, r in sorted(others.items())]
        more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
        return f"; the first to stop was rank {stopped_first}; {', '.join(parts[:_SHOWN])}{more}"
