"""Starting the processes of a run on this machine: exit codes, error messages, signals, no process left behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forks import run_script
from tests.torchrun import ROOT
from vapo_mcore.launch.ranks import ranks_below

LAUNCHER = "tests/launcher.py"
WORKER = "tests.distributed.launch_worker"


def _run(how: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_script(LAUNCHER, WORKER, how, str(folder), timeout=60)


def test_workers_get_torchruns_environment(tmp_path: Path) -> None:
    result = _run("fine", tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"rank_0": "2 127.0.0.1 1", "rank_1": "2 127.0.0.1 1"}


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("same_error", 2, "error: the model is not there\n"),
        ("own_error", 2, "error (rank 1): a disk is full\n"),
        ("killed", 128 + signal.SIGKILL, "error: the process of rank 1 was ended by signal SIGKILL\n"),
        ("exit_3_alone", 3, "error: the process of rank 1 ended with exit code 3\n"),
        ("finish", 0, ""),
    ],
)
def test_failure_is_told_once_and_gives_the_exit_code(how: str, code: int, message: str, tmp_path: Path) -> None:
    result = _run(how, tmp_path)
    assert (result.returncode, result.stderr) == (code, message)


def test_ranks_that_end_together_are_named(tmp_path: Path) -> None:
    """The launcher may see the end of one before that of the other, and then ends that one itself."""
    result = _run("exit_3", tmp_path)
    assert result.returncode == 3
    assert re.fullmatch(r"error: the process(es of ranks 0, 1| of rank [01]) ended with exit code 3\n", result.stderr)


def test_crash_shows_the_workers_traceback_only(tmp_path: Path) -> None:
    result = _run("crash", tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "ValueError: a bug" in result.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_all_processes(sent: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, LAUNCHER, WORKER, "wait", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=40)
    assert process.returncode == 128 + sent
    assert "Traceback" not in stderr or sent == signal.SIGINT  # a worker of this test does not catch the interrupt itself
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_rank_that_ends_with_exit_code_0_before_the_others_ends_the_run(tmp_path: Path) -> None:
    start = time.monotonic()
    result = _run("leave", tmp_path)
    assert time.monotonic() - start < 50
    assert result.returncode == 2
    assert re.fullmatch(r"error \(rank 0\): rank 1 exited with code 0 before the end of the run, \d+ s ago, .*\n", result.stderr)


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, which it cannot pass on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, LAUNCHER, WORKER, "wait", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks = ranks_below(process.pid)
        assert sorted(ranks.values()) == [0, 1]
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while any(_lives(rank) for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_rank_whose_launcher_is_gone_before_it_starts_ends_at_once() -> None:
    """The kernel was asked too late: nobody would end this rank."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = "from vapo_mcore.launch.ranks import end_with_launcher; end_with_launcher(); print('lives')"
    for launcher, expected in ((gone.pid, (-signal.SIGKILL, "")), (os.getpid(), (0, "lives\n")), (1, (0, "lives\n"))):
        rank = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "VAPO_MCORE_LAUNCHER": str(launcher)}
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **rank}, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout) == expected


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
