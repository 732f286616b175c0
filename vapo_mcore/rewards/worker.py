"""Worker process of the verifier pool: grades chunks of responses and reports its progress in shared memory.

The parent must know *which* response hangs, and for how long, even if the child is stuck in C code with the GIL held. So the child
writes its progress to memory shared with the parent (:class:`Progress`) before it enters a verifier.
"""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.context import SpawnContext
from typing import Any

from vapo_mcore.config.verifiers import Cause
from vapo_mcore.environments.types import Observation
from vapo_mcore.errors import VapoError
from vapo_mcore.rewards import limits
from vapo_mcore.rewards.registry import load_environment, load_verifier
from vapo_mcore.rewards.types import StepReward, StepScores, UngradableError

ENVIRONMENT = "environment/"
"""Prefix of the names of environments, which distinguishes them from verifiers."""

MAX_CHUNK = 64
"""Maximum number of responses in one chunk."""

SLICE_SECONDS = 0.5
"""After this time a worker returns a chunk unfinished, so that the rest can be distributed over all workers."""

_LAST_RESORT_SECONDS = 60.0
"""Time after its time limit at which a verifier that was not stopped (the trainer has died) ends its process."""

_DISTRIBUTED_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class Phase(IntEnum):
    """Current activity of a worker."""

    QUEUED = 0  # the parent has submitted a chunk; the worker has not started it
    LOADING = 1  # importing verifiers: not grading time
    GRADING = 2  # inside a verifier
    BETWEEN = 3  # neither: collecting or sending results


class Progress:
    """Progress of one worker process in memory shared with the parent. Each value is an aligned float64, so reads are not torn."""

    def __init__(self, context: SpawnContext) -> None:
        self._cells = context.RawArray("d", 4)

    def reset(self) -> None:
        """Reset before the parent submits a chunk."""
        self._cells[0] = Phase.QUEUED
        self._cells[1] = -1
        self._cells[2] = time.monotonic()

    def enter(self, phase: Phase, position: int = -1) -> None:
        """Enter a phase, in the worker; ``position`` is the index in the chunk of the response being graded."""
        self._cells[0] = Phase.BETWEEN  # a half-written state must not look like grading
        self._cells[1] = position
        self._cells[2] = time.monotonic()
        self._cells[3] = os.getpid()
        self._cells[0] = phase

    def read(self) -> tuple[Phase, int, float, int]:
        """Return ``(phase, position, monotonic time at which the phase began, process id or 0)``."""
        while True:
            phase, position, since, pid = self._cells
            if self._cells[0] == phase and self._cells[1] == position:
                return Phase(int(phase)), int(position), since, int(pid)


@dataclass(frozen=True)
class Graded:
    """Result of one response: a score, or the reason why there is none."""

    score: float
    error: str | None
    seconds: float
    cause: Cause | None = None
    steps: tuple[StepReward, ...] = ()
    observation: Observation | None = None


@dataclass
class ChunkResult:
    """Results for the first ``len(graded)`` responses of the chunk; ``load_error``: a verifier could not be imported."""

    graded: list[Graded] = field(default_factory=list)
    load_error: str | None = None


@dataclass(frozen=True)
class WorkerSettings:
    """Limits of a worker process. ``memory_bytes``: private memory; None = no limit."""

    timeout_seconds: float
    score_range: tuple[float, float]
    memory_bytes: int | None


_progress: Progress
_settings: WorkerSettings
_null_file: Any


def initialize_worker(progress: Progress, settings: WorkerSettings) -> None:
    """Initialise a new worker process, before any verifier is imported."""
    global _progress, _settings, _null_file
    _progress, _settings = progress, settings
    limits.grading_seconds = settings.timeout_seconds
    _null_file = open(os.devnull, "w")  # noqa: SIM115 - must stay open for the last-resort timer
    os.setsid()  # new process group, so that processes started by a verifier can be killed with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would wait until C code returns
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _settings.memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _settings.memory_bytes if hard == resource.RLIM_INFINITY else min(hard, _settings.memory_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    _remove_rank_environment()
    _adopt_orphans()


def _remove_rank_environment() -> None:
    """Remove the rank's environment variables: a verifier must not join process groups, bind ports or use an accelerator."""
    for name in [*_DISTRIBUTED_VARIABLES, *(n for n in os.environ if n.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"


def _adopt_orphans() -> None:
    """Become the parent of orphaned grandchildren (Linux), so that they are found and killed too."""
    import ctypes

    pr_set_child_subreaper = 36
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _end_leftover_processes() -> None:
    """Kill processes that a verifier left behind; a single system call if there are none."""
    for _ in range(1000):
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            _kill_children()


def _kill_children() -> None:
    listing = f"/proc/self/task/{os.getpid()}/children"
    try:
        with open(listing) as file:
            children = [int(word) for word in file.read().split()]
    except OSError:  # not Linux: the parent kills the whole group when the worker ends
        return
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    time.sleep(0.001)


Item = tuple[str, str | tuple[str, ...], str, Mapping[str, Any]]
"""(verifier, response, ground truth, metadata) or, for an environment, (environment, turns, ground truth, metadata)."""


def grade_chunk(names: Sequence[str], items: Sequence[Item]) -> ChunkResult:
    """Import the verifiers ``names`` (environments: with prefix ``ENVIRONMENT``), then process the items in order.

    May return early with results for only the first items.
    """
    result = ChunkResult()
    for name in names:
        _progress.enter(Phase.LOADING)
        try:
            _load(name)
        except BaseException as error:  # noqa: BLE001 - report anything that a user's module raises on import to the parent
            result.load_error = f"{described(name)} cannot be loaded: {error if isinstance(error, VapoError) else _error_text(error)}"
            return result
    began = time.monotonic()
    worker_pid = os.getpid()
    for position, (name, response, ground_truth, metadata) in enumerate(items):
        _progress.enter(Phase.GRADING, position)
        faulthandler.dump_traceback_later(_settings.timeout_seconds + _LAST_RESORT_SECONDS, exit=True, file=_null_file)
        if isinstance(response, str):
            graded = _grade(name, response, ground_truth, metadata)
        else:
            graded = _answer(name, response, ground_truth, metadata)
        if os.getpid() != worker_pid:  # the verifier forked and this is the child, which must not continue as a worker
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        _progress.enter(Phase.BETWEEN)
        result.graded.append(graded)
        _end_leftover_processes()
        if time.monotonic() - began > SLICE_SECONDS:
            break
    return result


def _grade(name: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Graded:
    start = time.perf_counter()
    score, error = 0.0, None
    cause: Cause = "verifier"
    steps: tuple[StepReward, ...] = ()
    try:
        found = load_verifier(name).score(response, ground_truth, metadata)
        given = found if isinstance(found, StepScores) else StepScores(found)
        score = given.score
        error = _score_fault(name, score)
        if error is None and (fault := given.fault(response)) is not None:
            error = f"verifier {name!r} returned {_shortened(fault)}"
        if error is None:  # convert to plain types: the result is sent to another process
            score, steps = float(score), tuple(StepReward(int(step.end), float(step.reward)) for step in given.steps)
    except UngradableError as fault:
        error, cause = str(fault), "ground_truth"
    except BaseException as fault:  # noqa: BLE001 - including SystemExit: a verifier that exits gives no verdict
        error = f"verifier {name!r} failed: {_error_text(fault)}"
    seconds = time.perf_counter() - start
    return Graded(0.0, error, seconds, cause) if error else Graded(score, None, seconds, steps=steps)


def _answer(name: str, turns: tuple[str, ...], ground_truth: str, metadata: Mapping[str, Any]) -> Graded:
    """Run an environment on the newest turn."""
    start = time.perf_counter()
    observation, error = Observation(None), None
    try:
        found = load_environment(name.removeprefix(ENVIRONMENT)).answer(turns, ground_truth, metadata)
        if found is not None and not isinstance(found, Observation):
            error = f"{described(name)} returned {_shortened(repr(found))}, must be an Observation or None"
        elif found is not None:
            observation = found
            fault = found.fault()
            error = None if fault is None else f"{described(name)} returned {_shortened(fault)}"
    except BaseException as fault:  # noqa: BLE001 - as for verifiers
        error = f"{described(name)} failed: {_error_text(fault)}"
    seconds = time.perf_counter() - start
    return Graded(0.0, error, seconds, "environment") if error else Graded(0.0, None, seconds, observation=observation)


def _load(name: str) -> object:
    return load_environment(name.removeprefix(ENVIRONMENT)) if name.startswith(ENVIRONMENT) else load_verifier(name)


def described(name: str) -> str:
    """Return the description of a verifier or environment for messages."""
    return f"environment {name.removeprefix(ENVIRONMENT)!r}" if name.startswith(ENVIRONMENT) else f"verifier {name!r}"


def _score_fault(name: str, score: object) -> str | None:
    low, high = _settings.score_range
    if not isinstance(score, (bool, int, float)) and not hasattr(score, "__float__"):
        return f"verifier {name!r} returned {_shortened(repr(score))}, must be a number"
    value = float(score)  # type: ignore[arg-type]
    if not math.isfinite(value):
        return f"verifier {name!r} returned {value}, must be a finite number"
    if not low <= value <= high:
        return f"verifier {name!r} returned {value}, must be between {low:g} and {high:g}"
    return None


def _error_text(error: BaseException) -> str:
    """Return type and message of an exception from user code, whose ``__str__`` may fail too."""
    try:
        message = _shortened(str(error))
    except BaseException:  # noqa: BLE001
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}"


def _shortened(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
