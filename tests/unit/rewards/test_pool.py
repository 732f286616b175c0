"""The pool: whatever one verifier does costs one verdict, and nothing else changes."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.rewards import misbehaving
from vapo_mcore.errors import RewardError
from vapo_mcore.rewards import GradeItem, Verdict, VerifierPool

BAD = "tests.unit.rewards.misbehaving:"
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(1, TIMEOUT, memory_gib=2.0) as pool:
        yield pool


def item(action: str, truth: str = "right") -> GradeItem:
    return GradeItem(BAD + "by_response", action, truth)


def children_of(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid,ppid,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()[1:]]
    return [int(p) for p, parent, state in rows if int(parent) == pid and not state.startswith("Z")]


def test_order_is_kept_and_scores_are_those_of_the_verifier(pool):
    answers = [random.Random(0).choice(["right", "wrong"]) for _ in range(300)]
    verdicts = pool.grade([item(answer) for answer in answers])
    assert [verdict.correct for verdict in verdicts] == [answer == "right" for answer in answers]
    assert [verdict.score for verdict in verdicts] == [float(answer == "right") for answer in answers]
    assert all(verdict.error is None and 0 <= verdict.seconds < TIMEOUT for verdict in verdicts)


def test_nothing_to_grade(pool):
    assert pool.grade([]) == []


def test_partial_scores_are_not_correct(pool):
    verdicts = pool.grade([GradeItem(BAD + "partial", text, "") for text in ("0.99", "1.0", "0", "0.9999999999")])
    assert [verdict.score for verdict in verdicts] == [0.99, 1.0, 0.0, 0.9999999999]
    assert [verdict.correct for verdict in verdicts] == [False, True, False, True]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("loop", "took longer than 1 s"),
        ("big power", "took longer than 1 s"),
        ("deaf", "took longer than 1 s"),
        ("exit 0", "ended its process (exit status 0)"),
        ("exit 3", "ended its process (exit status 3)"),
        ("kill", "ended its process (signal SIGKILL)"),
        ("segfault", "ended its process (signal SIGSEGV)"),
        ("abort", "ended its process (signal SIGABRT)"),
        ("allocate", "failed: MemoryError"),
        ("raise untold", "failed: _Untold: (its message cannot be read)"),
        ("raise", "failed: ZeroDivisionError: division by zero"),
        ("sys.exit", "failed: SystemExit: 4"),
        ("recurse", "failed: RecursionError"),
        ("nan", "returned nan, must be a finite number"),
        ("inf", "returned inf, must be a finite number"),
        ("none", "returned None, must be a number"),
        ("text", "returned '1.0', must be a number"),
        ("too large", "returned 1.5, must be between 0 and 1"),
        ("negative", "returned -0.1, must be between 0 and 1"),
    ],
)
def test_a_fault_costs_one_response_its_verdict(pool, action, reason):
    before = pool.stats.errors, pool.stats.graded
    names = ["right", "wrong", action, "right", "wrong"]
    start = time.monotonic()
    verdicts = pool.grade([item(name) for name in names])
    assert time.monotonic() - start < 15.0
    bad = verdicts.pop(2)
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0]
    assert all(verdict.error is None for verdict in verdicts)
    assert bad.error is not None and reason in bad.error and "by_response" in bad.error
    assert bad.score == 0.0 and not bad.correct
    assert (pool.stats.errors, pool.stats.graded) == (before[0] + 1, before[1] + 4)


def test_timeouts_and_crashes_are_counted():
    with VerifierPool(1, 0.5) as pool:
        verdicts = pool.grade([item(action) for action in ("right", "sleep", "exit 3", "nan", "raise", "right", "kill")])
        unreadable = pool.grade([GradeItem("math", r"\boxed{1}", r"\frac{1}{")])
        stats = pool.stats
    assert [verdict.cause for verdict in verdicts + unreadable] == [
        None, "timeout", "crash", "verifier", "verifier", None, "crash", "ground_truth"
    ]  # fmt: skip
    assert (stats.graded, stats.errors, stats.timeouts, stats.crashes, stats.restarts) == (2, 6, 1, 2, 3)


def test_a_copy_of_the_worker_does_not_go_on_as_a_worker(pool):
    verdicts = pool.grade([item("fork and return"), item("right"), item("fork and return"), item("wrong")])
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 1.0, 0.0]
    assert all(verdict.error is None for verdict in verdicts)


def test_processes_that_a_verifier_leaves_behind_are_ended(tmp_path):
    log = tmp_path / "pids"
    with VerifierPool(1, 5.0) as pool:
        assert pool.grade([GradeItem(BAD + "pid", str(log), "")])[0].correct
        worker, group = map(int, log.read_text().split())
        assert worker == group != os.getpgrp()
        assert pool.grade([item("fork and stay"), item("right")])[1].correct
        assert children_of(worker) == []
    groups = subprocess.run(["ps", "-eo", "pgid,stat"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in groups.splitlines() if line.split()[0] == str(group) and "Z" not in line]


def test_scenario_23_waiting_is_not_grading():
    """500 quick verdicts with one worker; the time-out is shorter than the queue takes, far longer than any verdict."""
    timeout = 2.0  # a busy machine may stop a worker for a second
    with VerifierPool(1, timeout) as pool:
        start = time.monotonic()
        verdicts = pool.grade([GradeItem(BAD + "short_sleep", "0.006", "") for _ in range(500)])
        assert time.monotonic() - start > 1.4 * timeout
    assert all(verdict == Verdict(1.0, True, None, verdict.seconds) for verdict in verdicts)
    assert pool.stats.timeouts == 0


def test_importing_a_verifier_is_not_grading_time():
    with VerifierPool(1, 0.75) as pool:
        start = time.monotonic()
        verdict = pool.grade([GradeItem("tests.unit.rewards.slow_import:equal", "7", "7")])[0]
        assert time.monotonic() - start > 1.5, "the module was imported before"
    assert verdict.correct and verdict.seconds < 0.75


def test_equal_answers_are_graded_once(pool):
    before = pool.stats.graded, pool.stats.cached
    responses = [rf"way {n}: \boxed{{1234321}}" for n in range(50)] + [r"\boxed{1234322}"]
    verdicts = pool.grade([GradeItem("math", response, "1234321") for response in responses])
    assert [verdict.correct for verdict in verdicts] == [True] * 50 + [False]
    assert (pool.stats.graded, pool.stats.cached) == (before[0] + 2, before[1] + 49)
    again = pool.grade([GradeItem("math", r"\boxed{1234321}", "1234321"), GradeItem("math", r"\boxed{1234321}", "7")])
    assert [verdict.correct for verdict in again] == [True, False]
    assert again[0].seconds == 0.0
    assert (pool.stats.graded, pool.stats.cached) == (before[0] + 3, before[1] + 50)


def test_the_cache_is_bounded_and_errors_are_not_remembered():
    with VerifierPool(1, 5.0, cache_size=2) as pool:
        for answer in ("1", "2", "3", "3", "1"):
            pool.grade([GradeItem("exact", answer, "3")])
        assert (pool.stats.graded, pool.stats.cached) == (4, 1)
        for _ in range(2):
            assert pool.grade([GradeItem("regex", "x", "(")])[0].error is not None
        assert pool.stats.errors == 2 and pool.stats.cached == 1


def test_a_user_verifier_is_never_answered_from_the_cache(tmp_path):
    log = tmp_path / "calls"
    with VerifierPool(1, 5.0) as pool:
        pool.grade([GradeItem(BAD + "pid", str(log), "")] * 3)
        pool.grade([GradeItem(BAD + "pid", str(log), "")] * 2)
    assert len(log.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mth", "unknown verifier 'mth': did you mean 'math'?"),
        ("my verifier", "'package.module:name'"),
        ("no_such_package.module:f", "cannot be loaded: no_such_package.module cannot be imported: ModuleNotFoundError"),
        (BAD + "no_such_function", "has no function 'no_such_function'"),
        (BAD + "not_a_function", "not_a_function is int, not a function"),
        ("tests.unit.rewards.broken_import:f", "this module is broken"),
    ],
)
def test_a_verifier_that_cannot_be_had_is_an_error_at_once(pool, name, message):
    with pytest.raises(RewardError) as load_error:
        pool.load([name])
    assert message in str(load_error.value)
    with pytest.raises(RewardError) as grade_error:
        pool.grade([item("right"), GradeItem(name, "a", "a")])
    assert message in str(grade_error.value)
    assert pool.grade([item("right")])[0].correct  # and the pool goes on


def test_a_verifier_whose_import_ends_the_process():
    name = "tests.unit.rewards.exits_at_import:f"
    with VerifierPool(1, 5.0) as pool:
        with pytest.raises(RewardError, match="cannot be kept alive"):
            pool.load([name])
        lost, right = pool.grade([GradeItem(name, "a", "a"), item("right")])
        assert lost.error is not None and not lost.correct  # no verdict, and the graders are replaced
        assert pool.grade([item("right")])[0].correct, right


def test_all_unknown_names_are_reported_together(pool):
    with pytest.raises(RewardError) as error:
        pool.load(["mth", "math", "exakt"])
    assert "'mth'" in str(error.value) and "did you mean 'exact'" in str(error.value)


def test_the_score_range_can_be_another():
    with VerifierPool(1, 5.0, score_range=(-2.0, 2.0), threshold=1.5) as pool:
        verdicts = pool.grade([GradeItem(BAD + "partial", text, "") for text in ("-2", "1.4", "1.5", "2.1")])
    assert [verdict.score for verdict in verdicts] == [-2.0, 1.4, 1.5, 0.0]
    assert [verdict.correct for verdict in verdicts] == [False, False, True, False]
    assert verdicts[3].error is not None and "between -2 and 2" in verdicts[3].error


@pytest.mark.parametrize(("workers", "timeout"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_impossible_sizes_are_refused(workers, timeout):
    with pytest.raises(RewardError, match="must be"):
        VerifierPool(workers, timeout)


def test_a_closed_pool_says_so_and_closing_twice_is_harmless():
    pool = VerifierPool(1, 1.0)
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.grade([item("right")])
    with pytest.raises(RewardError, match="closed"):
        pool.load(["math"])


@pytest.mark.parametrize("action", ["big power", "deaf"])
def test_closing_does_not_wait_for_a_verifier_that_hangs(action):
    pool = VerifierPool(1, 60.0)
    pool.load([BAD + "by_response"])
    outcome: list[object] = []

    def grade() -> None:
        try:
            outcome.extend(pool.grade([item(action)]))
        except RewardError as error:
            outcome.append(error)

    thread = threading.Thread(target=grade, daemon=True)
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 8.0
    thread.join(10.0)
    assert not thread.is_alive() and len(outcome) == 1


def test_workers_neither_import_the_stack_nor_the_parents_main_module(pool):
    heavy = "torch,vllm,megatron,transformers,pydantic,pytest"
    assert pool.grade([GradeItem(BAD + "modules", heavy, "")])[0].correct
    assert pool.grade([GradeItem(BAD + "main_module", "", "")])[0].correct


SCRIPT = """
import sys
print("main runs", flush=True)
import os
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", TORCHELASTIC_RUN_ID="x")
from vapo_mcore.rewards import GradeItem, VerifierPool
assert not {"torch", "sympy", "reasoning_gym"} & set(sys.modules), "importing the package must be cheap"
bad = "tests.unit.rewards.misbehaving:"
pool = VerifierPool(2, 5.0)  # no main guard, never closed
names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
verdicts = pool.grade([GradeItem(bad + "environment", name, "") for name in names] + [GradeItem("exact", "a", "a")])
print([verdict.score for verdict in verdicts], flush=True)
"""


def test_a_script_without_main_guard_under_a_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["main runs", "[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]"]


def test_many_threads_get_their_own_verdicts(pool):
    results: dict[int, list[bool]] = {}

    def grade(number: int) -> None:
        items = [GradeItem("exact", str(number + k % 2), str(number)) for k in range(20)]
        results[number] = [verdict.correct for verdict in pool.grade(items)]

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [True, False] * 10 for number in range(16)}


def test_processes_that_cannot_be_started_end_the_call(monkeypatch):
    def no_process(*args, **kwargs):
        raise OSError("Cannot allocate memory")

    with VerifierPool(2, 1.0, restarts=0) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("vapo_mcore.rewards.pool.ProcessPool.schedule", no_process)
            with pytest.raises(RewardError, match=r"cannot be kept alive: 3 in a row .* OSError: Cannot allocate memory"):
                pool.grade([item("right")])
        assert pool.grade([item("right")])[0].correct


@pytest.fixture
def deaths(tmp_path, monkeypatch):
    """A file that holds how many of the next worker processes end as soon as they have started."""
    file = tmp_path / "deaths"
    monkeypatch.setenv("TEST_POOL_DEATHS", str(file))
    monkeypatch.setattr("vapo_mcore.rewards.pool.initialize_worker", misbehaving.start_or_die)
    monkeypatch.setattr("vapo_mcore.rewards.pool._PAUSE_SECONDS", 0.05)
    return file


def test_a_pool_that_breaks_down_is_replaced_and_what_it_held_has_no_verdict(deaths):
    deaths.write_text("3")
    with VerifierPool(1, 5.0) as pool:
        verdicts = pool.grade([GradeItem("exact", str(n), str(n)) for n in range(8)])  # in chunks of two
        lost = [verdict for verdict in verdicts if verdict.error is not None]
        assert [verdict.error for verdict in lost] == ["the grading processes could not be kept alive"] * 2
        assert all(verdict.correct for verdict in verdicts if verdict.error is None)
        assert (pool.stats.graded, pool.stats.errors, pool.stats.crashes) == (6, 2, 2)
        assert (pool.take_restarts(), pool.take_restarts()) == (1, 0)
        assert all(verdict.correct for verdict in pool.grade([GradeItem("exact", str(n), str(n)) for n in range(8)]))  # not remembered


def test_a_pool_is_not_replaced_for_ever(deaths):
    deaths.write_text("1000")
    with VerifierPool(1, 5.0, restarts=1) as pool:
        with pytest.raises(
            RewardError, match=r"cannot be kept alive: 3 in a row .* All workers have already been replaced 1 times in a row"
        ):
            pool.grade([GradeItem("exact", str(n), str(n)) for n in range(8)])
        deaths.write_text("0")
        assert pool.grade([GradeItem("exact", "1", "1")])[0].correct
        deaths.write_text("3")  # a verdict in between: the count begins anew
        end_workers(pool)
        verdicts = pool.grade([GradeItem("exact", str(n), str(n)) for n in range(10, 18)])
        assert sum(verdict.error is not None for verdict in verdicts) == 2


def end_workers(pool: VerifierPool) -> None:
    for slot in pool._slots:
        os.kill(slot.progress()[3], signal.SIGKILL)


def test_metadata_that_cannot_be_sent_is_an_error(pool):
    with pytest.raises(RewardError, match="cannot be handed to a worker process"):
        pool.grade([GradeItem(BAD + "good", "a", "a", {"f": lambda: 0})])
    assert pool.grade([item("right")])[0].correct
