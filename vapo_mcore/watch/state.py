"""Read the state of a run from its files: lock holder, activity of each rank, metric rows, checkpoints, diagnosis."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from vapo_mcore.checkpoint_files import list_checkpoints
from vapo_mcore.config import Config, load_config
from vapo_mcore.diagnosis.monitor import Finding, Monitor
from vapo_mcore.errors import ConfigError, DataError
from vapo_mcore.launch.watchdog import has_hung, heartbeat_folder, read_heartbeats
from vapo_mcore.metrics_file import STAGES, GrowingMetrics, Row
from vapo_mcore.records.run_dir import finished_steps, holds_run
from vapo_mcore.records.run_lock import lock_holder, lock_path

SILENT_SECONDS = 60.0
"""A lock without renewal for this long counts as stale; its holder renews it every 5 s."""
LAST_STEPS = 50
"""Number of last steps over which the median step time is computed."""

Status = Literal["running", "stopped", "finished", "hung", "stale"]


@dataclass(frozen=True)
class RankState:
    """Heartbeat of a rank. ``since``, ``last``: wall-clock times of the start of its phase and of its last progress."""

    rank: int
    host: str
    phase: str
    step: str
    since: float
    last: float


@dataclass
class RunState:
    """Snapshot of a run.

    Attributes:
        status: "stale" if the lock is neither renewed nor released; ``reason`` has details.
        rows: rows of metrics.jsonl so far.
        ranks: ranks with a heartbeat, longest in their phase first.
        totals: planned steps of each stage; empty if the configuration cannot be read.
        findings: rules of the diagnosis that hold after the last step.
        counts: number of steps in which each rule has held.
        faults: messages about files that cannot be read.
    """

    path: Path
    status: Status
    reason: str
    rows: Sequence[Row]
    ranks: list[RankState]
    totals: dict[str, int]
    checkpoints: list[Path]
    findings: list[Finding]
    counts: dict[str, int]
    faults: list[str] = field(default_factory=list)

    def steps(self, stage: str) -> list[Row]:
        """Return the rows of a stage's steps, without the evaluation before the first step."""
        return [row for row in self.rows if row.get("stage", "rl") == stage and row["step"] > 0]

    @property
    def stage(self) -> str:
        """Return the stage of the last step; before any step, the run's first stage."""
        steps = [row for row in self.rows if row["step"] > 0]
        if steps:
            return str(steps[-1].get("stage", "rl"))
        return "value_pretraining" if self.totals.get("value_pretraining") else "rl"

    def seconds_left(self) -> float | None:
        """Return the remaining steps of each stage times its median step time; None before the first step.

        A stage without steps uses the other stage's time. Evaluations and other work between steps are not included.
        """
        medians = {stage: _median_step(self.steps(stage)) for stage in STAGES}
        known = [seconds for seconds in medians.values() if seconds is not None]
        if not known or not self.totals:
            return None
        left = 0.0
        for number, stage in enumerate(STAGES):
            over = number < STAGES.index(self.stage)
            made = self.steps(stage)
            remaining = 0 if over else max(0, self.totals[stage] - (made[-1]["step"] if made else 0))
            seconds = medians[stage]
            left += remaining * (known[-1] if seconds is None else seconds)
        return left


def _median_step(rows: Sequence[Row]) -> float | None:
    seconds = [row["time/step"] for row in rows[-LAST_STEPS:] if row.get("time/step") is not None]
    return median(seconds) if seconds else None


class RunReader:
    """Reads a run repeatedly; reads only new rows of its metrics. Raises ConfigError for a folder that is not a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(f"{str(path)!r} is no directory; give the run directory (run.dir) of a run")
        if not holds_run(self.path):
            raise ConfigError(f"{str(path)!r} holds no run of vapo-mcore; give the run directory (run.dir) of a run")
        self._metrics = GrowingMetrics(self.path / "metrics.jsonl")
        self._config_content: bytes | None = None
        self._config: Config | None = None
        self._config_fault: str | None = None
        self._monitor: Monitor | None = None
        self._observed: list[Row] = []
        self._findings: list[Finding] = []

    def read(self) -> RunState:
        """Read the current state from the files."""
        faults: list[str] = []
        status, reason = run_status(self.path, time.time())  # before the rows: a finished run has written all of them
        try:
            self._metrics.refresh()
        except DataError as error:
            faults.append(str(error))
        self._read_config()
        if self._config_fault is not None:
            faults.append(f"config.yaml cannot be read, so that totals and diagnosis are missing: {self._config_fault}")
        self._observe()
        ranks, unread = rank_states(self.path)
        faults += unread
        config, monitor = self._config, self._monitor
        totals = {}
        if config is not None:
            pretraining = config.critic.value_pretraining.max_steps if config.uses_critic else 0
            totals = {"value_pretraining": pretraining, "rl": config.run.steps}
        return RunState(
            path=self.path,
            status=status,
            reason=reason,
            rows=self._metrics.rows,
            ranks=ranks,
            totals=totals,
            checkpoints=list_checkpoints(self.path),
            findings=self._findings,
            counts={} if monitor is None else dict(monitor.counts),
            faults=faults,
        )

    def _read_config(self) -> None:
        """Read the configuration again if a resume has changed it; stores the error if it cannot be read."""
        path = self.path / "config.yaml"
        try:
            content = path.read_bytes()
        except OSError as error:
            self._config_content, self._config, self._monitor, self._config_fault = None, None, None, str(error)
            return
        if content != self._config_content:
            self._config_content, self._config, self._monitor, self._config_fault = content, None, None, None
            try:
                self._config = load_config(path, check_paths=False)
            except ConfigError as error:
                self._config_fault = str(error)

    def _observe(self) -> None:
        """Apply the rules to new rows, or to all rows if a resume has rewound the run."""
        rows = self._metrics.rows
        if self._config is None:
            self._findings = []
            return
        if self._monitor is None or rows[: len(self._observed)] != self._observed:
            self._monitor, self._observed, self._findings = Monitor(self._config), [], []
        for row in rows[len(self._observed) :]:
            self._observed.append(row)
            self._findings = self._monitor.observe(row)


def run_status(path: Path, now: float) -> tuple[Status, str]:
    """Return whether the run is alive at wall-clock time ``now``, and the evidence."""
    steps = finished_steps(path)
    if steps is not None:
        return "finished", f"{steps} steps"
    if has_hung(path):
        return "hung", f"the watchdog ended it; stacks of all ranks: {heartbeat_folder(path)}"
    holder = lock_holder(path)
    if holder is None:
        return "stopped", "no process holds it; train --resume continues it"
    who = f"process {holder.get('pid')} on {holder.get('host')}"
    try:
        silent = now - lock_path(path).stat().st_mtime
    except OSError:
        silent = 0.0  # released meanwhile
    if silent > SILENT_SECONDS:
        return "stale", f"no lock renewal by {who} for {duration(silent)}; it ended without releasing the run, or its file system hangs"
    return "running", who


def rank_states(path: Path) -> tuple[list[RankState], list[str]]:
    """Return the ranks' reported phases, longest in its phase first, and the faults of heartbeat files that cannot be read."""
    found, faults = [], []
    records = read_heartbeats(path)
    for file in sorted(heartbeat_folder(path).glob("rank_*.json")):
        number = file.stem.removeprefix("rank_")
        record = records.get(int(number)) if number.isdecimal() else None
        try:
            if record is None:
                raise ValueError("no JSON object of a rank")
            since, last = float(record["since"]), float(record["last"])
            if not (math.isfinite(since) and math.isfinite(last)):
                raise ValueError(f"since {since}, last {last}")
            found.append(RankState(int(number), str(record["host"]), str(record["phase"]), str(record["step"]), since, last))
        except KeyError as error:
            faults.append(f"{file} has no {error}: written by another version?")
        except (TypeError, ValueError, OverflowError) as error:
            if file.exists():  # a start clears the folder
                faults.append(f"{file} is invalid: {error}")
    return sorted(found, key=lambda state: state.since), faults


def duration(seconds: float) -> str:
    """Format a duration in at most two units: 42 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    whole = round(max(seconds, 0.0))
    for unit, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def last_evaluation(rows: Sequence[Row]) -> tuple[int, dict[str, Any]] | None:
    """Return step and ``eval/...`` entries of the last evaluated row."""
    for row in reversed(rows):
        found = {name: value for name, value in row.items() if name.startswith("eval/")}
        if found:
            return row["step"], found
    return None
