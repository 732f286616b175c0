"""A rank that dies or hangs while another waits for it in a collective ends the run, in time, and it is told which rank and where."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.forks import run_script
from tests.torchrun import run_torchrun
from vapo_mcore.errors import EXIT_HANG

LAUNCHED = ("tests/launcher.py", "tests.distributed.ends_worker")


def seconds_since(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    result = run_script(*LAUNCHED, "die", str(tmp_path), timeout=120)
    assert seconds_since(tmp_path / "began_1") < 60
    assert result.returncode == 128 + signal.SIGKILL, result.stderr[-4000:]
    assert "error: the process of rank 1 was ended by signal SIGKILL" in result.stderr


def test_a_rank_that_is_killed_ends_the_run_under_plain_torchrun(tmp_path: Path) -> None:
    result = run_torchrun("tests/distributed/ends_worker.py", 2, "die", str(tmp_path), timeout=120)
    assert seconds_since(tmp_path / "began_1") < 60
    assert result.returncode == 1
    assert "rank      : 1 (local_rank: 1)" in result.stderr
    assert "exitcode  : -9" in result.stderr


def test_a_hang_in_a_collective_is_found_and_told(tmp_path: Path) -> None:
    result = run_script(*LAUNCHED, "hang", str(tmp_path), timeout=120)
    assert seconds_since(tmp_path / "began_1") < 60
    assert result.returncode == EXIT_HANG, result.stderr[-4000:]
    told = [line for line in result.stderr.splitlines() if line.startswith("error (rank ")]
    assert told
    assert all("no progress for" in line and "in phase policy_update of rl 3" in line for line in told)
    assert all("the first to stop was rank" in line and str(tmp_path / "heartbeats") in line for line in told)
    for rank in (0, 1):
        stacks = (tmp_path / "heartbeats" / f"rank_{rank:04d}.stacks").read_text()
        assert f"rank {rank} hangs" in stacks
        assert "in all_reduce" in stacks
        assert "in waits_in_a_collective" in stacks
