"""The watchdog in processes of its own: whoever hangs is ended and leaves its stacks, whoever waits for a busy rank is not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from vapo_mcore.errors import EXIT_HANG, ConfigError
from vapo_mcore.launch.watchdog import Watchdog

LIMIT = 1.0


CASES = {"wait": ["wait"], "hold": ["hold"], "two": ["wait", "2.5"], "ends": ["0"]}  # what each rank does


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass
class Case:
    """A run directory and how its ranks ended."""

    folder: Path
    ranks: list[Ended]

    def stacks(self, rank: int) -> str:
        return (self.folder / "heartbeats" / f"rank_{rank:04d}.stacks").read_text()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All processes at the same time: they mostly wait."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CASES}
    began = time.monotonic()
    processes = {name: [start(folders[name], rank, len(hows), how) for rank, how in enumerate(hows)] for name, hows in CASES.items()}
    return {name: Case(folders[name], [finish(process, began) for process in ranks]) for name, ranks in processes.items()}


def start(run_dir: Path, rank: int, world_size: int, how: str) -> subprocess.Popen[str]:
    limit = 30.0 if how == "0" else LIMIT
    command = [sys.executable, "-m", "tests.unit.launch.watched", str(run_dir), str(rank), str(world_size), str(limit), how]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], began: float) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, stdout, stderr, time.monotonic() - began)


def test_a_process_that_hangs_says_where_and_ends(cases: dict[str, Case]) -> None:
    case = cases["wait"]
    (rank,) = case.ranks
    assert (rank.code, rank.stdout) == (EXIT_HANG, "")
    assert rank.seconds > LIMIT
    assert "error: no progress for" in rank.stderr
    assert "in phase policy_update of rl 7 (faults.hang_minutes)" in rank.stderr
    for text in (rank.stderr, case.stacks(0)):
        assert "rank 0 hangs" in text
        assert "in waits_for_ever" in text
        assert "in _watch" in text  # all threads
    found = json.loads((case.folder / "heartbeats" / "rank_0000.json").read_text())
    assert (found["phase"], found["step"], found["rank"]) == ("policy_update", "rl 7", 0)
    assert found["last"] <= found["written"] <= time.time()


def test_code_that_holds_the_interpreter_is_ended_too(cases: dict[str, Case]) -> None:
    case = cases["hold"]
    assert case.ranks[0].code == 1  # faulthandler's own
    assert "Timeout" in case.stacks(0)
    assert "in holds_the_interpreter" in case.stacks(0)


def test_a_rank_may_wait_for_one_that_is_busy_and_both_end_when_it_is_not(cases: dict[str, Case]) -> None:
    """Rank 0 waits all the time; rank 1 works for more than twice the limit and then stops too."""
    case = cases["two"]
    assert [rank.code for rank in case.ranks] == [EXIT_HANG, EXIT_HANG]
    assert all(rank.seconds > 2.5 + LIMIT for rank in case.ranks)
    assert "in waits_for_ever" in case.stacks(0)
    assert "in waits_for_ever" in case.stacks(1)
    told = case.ranks[0].stderr + case.ranks[1].stderr  # by whichever saw it first
    assert "the first to stop was rank 0; " in told
    assert "rank 1: start of rl 7; stacks" in told or "rank 0: policy_update of rl 7; stacks" in told


def test_a_process_that_ends_by_itself_leaves_no_stacks(cases: dict[str, Case]) -> None:
    case = cases["ends"]
    (rank,) = case.ranks
    assert (rank.code, rank.stdout, rank.stderr) == (0, "done\n", "")
    assert [path.name for path in (case.folder / "heartbeats").iterdir()] == ["rank_0000.json"]


def test_what_an_earlier_start_left_is_cleared_and_without_a_limit_nothing_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    for name in ("hung", "rank_0003.json", "rank_0003.stacks", "notes.txt"):
        (folder / name).touch()
    with Watchdog(None, rank=0, world_size=1) as off:
        off.clear(tmp_path)
        off.attach(tmp_path)
    assert len(list(folder.iterdir())) == 4
    with Watchdog(100.0, rank=0, world_size=1) as watchdog:
        watchdog.clear(tmp_path)
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_run_directory_that_a_rank_does_not_see_is_told(tmp_path: Path) -> None:
    with Watchdog(100.0, rank=1, world_size=2) as watchdog, pytest.raises(ConfigError, match="all nodes must see the same folder"):
        watchdog.attach(tmp_path / "elsewhere")
