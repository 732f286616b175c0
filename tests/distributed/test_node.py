"""The process around torchrun on each node: signals reach the ranks, the ranks' errors and exit codes come back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torchrun import ROOT, run_bounded

NODE = [sys.executable, "-m", "vapo_mcore.launch.node"]
WORKER = str(ROOT / "tests" / "distributed" / "launch_worker.py")


def _torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", *options, WORKER]


def test_a_missing_directory_or_program_is_one_message(tmp_path: Path) -> None:
    result = run_bounded([*NODE, "--directory", str(tmp_path / "no"), "torchrun"], timeout=60)
    assert result.returncode == 2
    assert "the working directory" in result.stderr
    result = run_bounded([*NODE, "--directory", str(tmp_path), "no-such-program"], timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("error: 'no-such-program' cannot be started on node")


@pytest.mark.parametrize(("how", "code", "message"), [("own_error", 2, "error: a disk is full\n"), ("killed", 1, ""), ("judge", 2, "")])
def test_errors_of_the_ranks(how: str, code: int, message: str, tmp_path: Path) -> None:
    result = run_bounded([*NODE, *_torchrun("--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0"), how, str(tmp_path)], timeout=60)
    assert result.returncode == code
    assert message in result.stderr
    assert how != "judge" or "Traceback" not in result.stderr  # torchrun has nothing to report then


def test_the_warning_signal_on_two_nodes(tmp_path: Path) -> None:
    """SIGUSR1 to the process of each node alone, as Slurm sends it: the ranks stop in good order and the exit code is theirs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    torchrun = _torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, "--rdzv-id", "test")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*NODE, *torchrun, "stop", str(tmp_path)]
    nodes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for node in nodes:
            node.send_signal(signal.SIGUSR1)
        for node in nodes:
            _, stderr = node.communicate(timeout=60)
            assert node.returncode == 75
            assert "stopped: stopped after step 3\n" in stderr
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def test_a_signal_before_the_ranks_can_stop_ends_them(tmp_path: Path) -> None:
    torchrun = _torchrun("--nproc-per-node", "1", "--rdzv-endpoint", "localhost:0")
    process = subprocess.Popen([*NODE, *torchrun, "wait", str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_signal_before_there_are_ranks_asks_for_another_start(tmp_path: Path) -> None:
    """torchrun waits for a second node that never comes."""
    torchrun = _torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "test")
    process = subprocess.Popen([*NODE, *torchrun, "fine", str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        time.sleep(4)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 75
        assert list(tmp_path.iterdir()) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
