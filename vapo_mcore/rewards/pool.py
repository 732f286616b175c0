"""Pool of killable worker processes that grade responses, so that a faulty verifier costs at most one verdict.

    with VerifierPool(workers=2, timeout_seconds=5.0) as pool:
        verdicts = pool.grade([GradeItem("math", r"... so \\boxed{42}", "42")])

A verifier may hang (even inside C code), crash its process, fork, exhaust memory or return invalid scores. The response being graded
then gets a :class:`Verdict` with ``error`` set, the process is replaced, and all other responses are graded normally. Each worker
has one chunk at a time. The time limit of a response covers only its verifier, not waiting in the queue or importing the verifier.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from vapo_mcore import heartbeat
from vapo_mcore.environments.types import Observation, Reply, TurnRequest
from vapo_mcore.errors import RewardError
from vapo_mcore.rewards.light_spawn import LightSpawnContext
from vapo_mcore.rewards.registry import answer_key, check_verifier_names
from vapo_mcore.rewards.types import GradeItem, PoolStats, StepReward, Verdict
from vapo_mcore.rewards.worker import (
    ENVIRONMENT,
    MAX_CHUNK,
    ChunkResult,
    Graded,
    Phase,
    Progress,
    WorkerSettings,
    described,
    grade_chunk,
    initialize_worker,
)

logger = logging.getLogger(__name__)

LOAD_SECONDS = 180.0
"""Time limit on starting a worker process and on importing a verifier's module."""

_MAX_FAILED_STARTS = 3
_CLOSE_SECONDS = 10.0
_TICK_SECONDS = 0.05
_ROUNDING = 1e-9
_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 30.0
"""Bounds of the pause before all workers are replaced; it doubles with each consecutive replacement."""


class _WorkersLostError(RewardError):
    """No worker process stays alive; ``chunk`` is the last one's chunk."""

    def __init__(self, message: str, chunk: list[int]) -> None:
        super().__init__(message)
        self.chunk = chunk


_Known = tuple[float, bool, tuple[StepReward, ...]]
"""A cached verdict: score, correct, steps."""


@dataclass(frozen=True)
class _Turns:
    """A request to an environment, with the attributes of a GradeItem."""

    verifier: str
    response: tuple[str, ...]
    ground_truth: str
    metadata: Mapping[str, Any]


_Item = GradeItem | _Turns


class _Slot:
    """One worker process and its current chunk; ends and replaces the process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._context = LightSpawnContext()
        self.future: Future[ChunkResult] | None = None
        self.chunk: list[int] = []
        self.names: list[str] = []
        self._ending = threading.Lock()
        self._processes: ProcessPool | None = None
        self._new_process()

    def _new_process(self) -> None:
        self._progress = Progress(self._context)
        self._processes = ProcessPool(
            max_workers=1,
            initializer=initialize_worker,
            initargs=(self._progress, self._settings),
            context=self._context,
        )

    def submit(self, names: list[str], chunk: list[int], items: Sequence[_Item]) -> None:
        """Submit a chunk (indices into ``items``, possibly empty) and the verifiers to import for it.

        Raises:
            RuntimeError, OSError: the process cannot be started.
        """
        if self._processes is None:
            raise RuntimeError("the process has been ended")
        self._progress.reset()
        self.names, self.chunk = names, chunk
        payload = [(i.verifier, i.response, i.ground_truth, i.metadata) for i in (items[index] for index in chunk)]
        self.future = self._processes.schedule(grade_chunk, args=(names, payload))

    def progress(self) -> tuple[Phase, int, float, int]:
        return self._progress.read()

    def release(self) -> list[int]:
        """Free the slot and return its chunk."""
        chunk, self.chunk, self.future = self.chunk, [], None
        return chunk

    def replace(self) -> threading.Thread | None:
        """Kill the process and start a new one. Returns the thread that cleans up the old one."""
        ended = self.end()
        self._new_process()
        return ended

    def end(self) -> threading.Thread | None:
        """Kill the process and everything it started. Returns the thread that joins pebble's resources.

        Returns None if it was already ended: closing the pool may race with a replacement in another thread.
        """
        with self._ending:
            processes, self._processes = self._processes, None
        if processes is None:
            return None
        pid = self._progress.read()[3]
        processes.stop()
        if pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        thread = threading.Thread(target=processes.join, name="verifier-pool-end", daemon=True)
        thread.start()
        return thread


class VerifierPool:
    """Grades responses in worker processes. Use as a context manager.

    Args:
        workers: number of processes.
        timeout_seconds: wall-clock limit on the verifier of one response.
        threshold: minimum score of a ``correct`` verdict.
        score_range: range of valid scores; other scores give an error verdict.
        cache_size: number of cached verdicts (LRU).
        memory_gib: limit on a worker's private memory, so that a huge number gives an error verdict instead of the OOM killer ending the
            trainer; None: no limit.
        restarts: how many times in a row, without a verdict in between, ``grade`` replaces all workers when none stays alive. The
            responses being graded then get no verdict.

    Raises:
        RewardError: a verifier is unknown or cannot be imported, or workers cannot be kept alive.
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        *,
        threshold: float = 1.0,
        score_range: tuple[float, float] = (0.0, 1.0),
        cache_size: int = 100_000,
        memory_gib: float | None = 4.0,
        restarts: int = 3,
    ) -> None:
        if workers < 1:
            raise RewardError(f"reward.workers is {workers}, must be at least 1")
        if not timeout_seconds > 0:
            raise RewardError(f"reward.timeout_seconds is {timeout_seconds}, must be above 0")
        self.stats = PoolStats()
        self._timeout = float(timeout_seconds)
        self._threshold = threshold
        self._cache: OrderedDict[Hashable, _Known] = OrderedDict()
        self._cache_size = cache_size
        memory = None if memory_gib is None else int(memory_gib * 2**30)
        self._settings = WorkerSettings(self._timeout, score_range, memory)
        self._lock = threading.Lock()
        self._failed_starts = 0
        self._max_restarts = restarts
        self._restarts_in_a_row = 0
        self._restarts_untaken = 0
        self._closed = False
        self._endings: list[threading.Thread] = []
        self._slots: list[_Slot] = [_Slot(self._settings) for _ in range(workers)]

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers. Returns within seconds even if a verifier hangs. Idempotent."""
        if self._closed:
            return
        self._closed = True  # stops a call of grade in another thread
        self._endings += [thread for slot in self._slots if (thread := slot.end()) is not None]
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._endings:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._endings):
            logger.warning("a verifier process did not end within %.0f s; no longer waiting for it", _CLOSE_SECONDS)
        self._endings = []

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the verifier pool is closed")

    def load(self, verifiers: Sequence[str], environments: Sequence[str] = ()) -> None:
        """Import these verifiers and environments in every worker, so that faults are raised before the first response.

        Raises:
            RewardError: a name is unknown, or a verifier cannot be imported.
        """
        check_verifier_names(verifiers)
        with self._lock, self._clean_after_failure():
            self._check_open()
            for slot in self._slots:
                self._submit(slot, list(dict.fromkeys([*verifiers, *(ENVIRONMENT + name for name in environments)])), [], [])
            self._drain(deque(), [], {})

    def grade(self, items: Sequence[GradeItem]) -> list[Verdict]:
        """Grade ``items``; returns the verdicts in order.

        Grades responses with the same extracted answer once. Never raises because of a response.

        Raises:
            RewardError: a verifier is unknown or cannot be imported, or no worker process stays alive.
        """
        if not items:
            return []
        check_verifier_names(dict.fromkeys(item.verifier for item in items))
        with self._lock:
            self._check_open()
            keys = [answer_key(item) for item in items]
            firsts: dict[Hashable, int] = {}
            known: dict[Hashable, _Known] = {}
            for index, key in enumerate(keys):
                if key in self._cache:
                    self._cache.move_to_end(key)
                    known[key] = self._cache[key]
                else:
                    firsts.setdefault(key, index)
            return self._collect(keys, firsts, known, self._process_queue(deque(firsts.values()), items))

    def respond(self, environment: str, requests: Sequence[TurnRequest]) -> list[Reply]:
        """Return an environment's reply to the newest turn of each response, in order. Never raises because of a response.

        Raises:
            RewardError: the environment cannot be imported, or no worker process stays alive.
        """
        if not requests:
            return []
        items = [_Turns(ENVIRONMENT + environment, r.turns, r.ground_truth, r.metadata) for r in requests]
        with self._lock:
            self._check_open()
            answered = self._process_queue(deque(range(len(items))), items)
        results = [answered[index] for index in range(len(items))]
        return [Reply(result.observation or Observation(None), result.error) for result in results]

    def _process_queue(self, queue: deque[int], items: Sequence[_Item]) -> dict[int, Graded]:
        """Process the queued items and return their results; replaces all workers if none stays alive."""
        results: dict[int, Graded] = {}
        with self._clean_after_failure():
            while True:
                try:
                    self._drain(queue, items, results)
                    return results
                except _WorkersLostError as lost:
                    self._restart(str(lost), lost.chunk, results)

    def take_restarts(self) -> int:
        """Return how often all workers were replaced since the last call."""
        taken, self._restarts_untaken = self._restarts_untaken, 0
        return taken

    def _restart(self, reason: str, chunk: list[int], graded: dict[int, Graded]) -> None:
        """Replace all workers; the responses being graded get no verdict. Raises RewardError after too many consecutive attempts."""
        tried = self._restarts_in_a_row
        if tried >= self._max_restarts:
            before = f" All workers have already been replaced {tried} times in a row (faults.grader_restarts)." if tried else ""
            raise RewardError(reason + before)
        self._restarts_in_a_row += 1
        self._restarts_untaken += 1
        self._failed_starts = 0
        logger.warning("%s Replacing all workers; the responses being graded get no verdict.", reason)
        time.sleep(min(_MAX_PAUSE_SECONDS, _PAUSE_SECONDS * 2**tried))  # a shortage of memory may be temporary
        self._check_open()
        for index in [*chunk, *(index for slot in self._slots for index in slot.release())]:
            graded[index] = Graded(0.0, "the grading processes could not be kept alive", 0.0, "crash")
        for slot in self._slots:
            self._replace(slot)

    def _collect(
        self,
        keys: list[Hashable],
        firsts: dict[Hashable, int],
        known: dict[Hashable, _Known],
        graded: dict[int, Graded],
    ) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for index, key in enumerate(keys):
            if key in known:
                self.stats.cached += 1
                score, correct, steps = known[key]
                verdicts.append(Verdict(score, correct, None, 0.0, steps))
                continue
            first = firsts[key]
            result = graded[first]
            correct = result.error is None and result.score >= self._threshold - _ROUNDING
            seconds = result.seconds if index == first else 0.0
            verdicts.append(Verdict(result.score, correct, result.error, seconds, result.steps, result.cause))
            self.stats.seconds += seconds
            if result.error is not None:
                self.stats.errors += 1
                self.stats.timeouts += result.cause == "timeout"
                self.stats.crashes += result.cause == "crash"
            elif index == first:
                self.stats.graded += 1
                self._remember(key, (result.score, correct, result.steps))
            else:
                self.stats.cached += 1
        return verdicts

    def _remember(self, key: Hashable, verdict: _Known) -> None:
        self._cache[key] = verdict
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    @contextmanager
    def _clean_after_failure(self) -> Iterator[None]:
        """Replace busy workers after an interrupt or a RewardError, so that no result of this call reaches the next one."""
        self._failed_starts = 0
        try:
            yield
        except BaseException:
            for slot in self._slots:
                if slot.future is not None:
                    slot.release()
                    self._replace(slot)
            raise

    def _drain(self, queue: deque[int], items: Sequence[_Item], results: dict[int, Graded]) -> None:
        size = max(1, min(MAX_CHUNK, len(queue) // (4 * len(self._slots))))
        tick = min(_TICK_SECONDS, self._timeout / 4)
        while True:
            self._check_open()
            for slot in self._slots:
                if slot.future is None and queue:
                    chunk = [queue.popleft() for _ in range(min(size, len(queue)))]
                    self._submit(slot, list(dict.fromkeys(items[index].verifier for index in chunk)), chunk, items)
            busy = [slot.future for slot in self._slots if slot.future is not None]
            if not busy:
                return
            wait(busy, timeout=tick, return_when=FIRST_COMPLETED)
            for slot in self._slots:
                if slot.future is not None:
                    self._attend(slot, queue, results, items)

    def _submit(self, slot: _Slot, names: list[str], chunk: list[int], items: Sequence[_Item]) -> None:
        while True:
            self._check_open()
            try:
                slot.submit(names, chunk, items)
                return
            except (RuntimeError, OSError) as error:
                slot.release()
                self._replace(slot)
                self._count_failed_start(f"{type(error).__name__}: {error}", chunk)

    def _attend(self, slot: _Slot, queue: deque[int], results: dict[int, Graded], items: Sequence[_Item]) -> None:
        """Take a worker's results, or handle its time-out or death."""
        assert slot.future is not None
        phase, position, since, pid = slot.progress()
        elapsed = time.monotonic() - since
        if slot.future.done():
            error = slot.future.exception()
            if error is None:
                self._take(slot, slot.future.result(), queue, results)
            elif isinstance(error, ProcessExpired | BrokenProcessPool):
                self._process_ended(slot, _how_it_ended(error), queue, results, items)
            else:
                raise RewardError(f"responses cannot be handed to a worker process: {error!r}") from error
        elif phase is Phase.GRADING and elapsed > self._timeout:
            reason = f"{{}} took longer than {self._timeout:g} s"
            self._give_up(slot, position, Graded(0.0, reason, elapsed, "timeout"), queue, results, items)
        elif phase is not Phase.QUEUED and not _is_alive(pid):
            # pebble reports dead workers, but treats exit status 0 as a regular end.
            self._process_ended(slot, "exit status 0", queue, results, items)
        elif phase is not Phase.GRADING and elapsed > LOAD_SECONDS:
            self._start_over(slot, f"{phase.name.lower()} for more than {LOAD_SECONDS:g} s", queue, items)

    def _take(self, slot: _Slot, outcome: ChunkResult, queue: deque[int], results: dict[int, Graded]) -> None:
        chunk = slot.release()
        if outcome.load_error is not None:
            queue.clear()
            raise RewardError(outcome.load_error)
        heartbeat.alive()
        self._failed_starts = 0
        if outcome.graded:
            self._restarts_in_a_row = 0
        results.update(zip(chunk, outcome.graded, strict=False))
        queue.extendleft(reversed(chunk[len(outcome.graded) :]))

    def _process_ended(self, slot: _Slot, how: str, queue: deque[int], results: dict[int, Graded], items: Sequence[_Item]) -> None:
        phase, position, since, _ = slot.progress()
        if phase is Phase.GRADING:
            reason = f"{{}} ended its process ({how})"
            crash = Graded(0.0, reason, time.monotonic() - since, "crash")
            self._give_up(slot, position, crash, queue, results, items)
        else:
            self._start_over(slot, how, queue, items)

    def _give_up(
        self,
        slot: _Slot,
        position: int,
        outcome: Graded,
        queue: deque[int],
        results: dict[int, Graded],
        items: Sequence[_Item],
    ) -> None:
        """Give one response an error verdict and requeue the rest of its chunk."""
        chunk = slot.release()
        blamed = chunk.pop(position)
        queue.extendleft(reversed(chunk))
        assert outcome.error is not None
        results[blamed] = replace(outcome, error=outcome.error.format(described(items[blamed].verifier)))
        self._failed_starts = 0
        self._replace(slot)

    def _start_over(self, slot: _Slot, how: str, queue: deque[int], items: Sequence[_Item]) -> None:
        """Requeue the work of a process that ended outside any verifier, so no response is to blame."""
        names, chunk = slot.names, slot.release()
        self._replace(slot)
        self._count_failed_start(how, chunk)
        queue.extendleft(reversed(chunk))
        if not chunk:
            self._submit(slot, names, [], items)

    def _count_failed_start(self, how: str, chunk: list[int]) -> None:
        self._failed_starts += 1
        logger.warning("a verifier process ended before it graded anything (%s)", how)
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise _WorkersLostError(
                f"verifier processes cannot be kept alive: {self._failed_starts} in a row ended outside any verifier, "
                f"the last one with {how}; its message, if any, is printed above. Likely causes are too little memory "
                "(reward.workers processes run next to the trainer) and a verifier whose import ends the process.",
                chunk,
            )

    def _replace(self, slot: _Slot) -> None:
        self.stats.restarts += 1
        self._endings = [thread for thread in self._endings if thread.is_alive()]
        if (ending := slot.replace()) is not None:
            self._endings.append(ending)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _how_it_ended(error: BaseException) -> str:
    code = getattr(error, "exitcode", None)
    if not isinstance(code, int):
        return "end not seen"
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
