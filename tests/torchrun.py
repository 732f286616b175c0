"""Run a script in several processes under torchrun, with a timeout.

``run_torchrun("tests/distributed/worker.py", 4, "argument")`` returns the finished process with its output; the test checks the exit code.
After ``timeout`` seconds the process and all its descendants are killed and the test fails with the output so far.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.forks import ROOT, inherited


def run_torchrun(script: str | Path, nproc: int, *args: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """Run ``script`` (relative to the repository or absolute) under torchrun on a free port; captures stdout and stderr as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1", str(ROOT / script), *args]
    return run_bounded(command, timeout=timeout)


def run_bounded(
    command: list[str], *, timeout: float, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command``; kill it and all its descendants after ``timeout`` seconds. ``environment`` replaces the inherited one."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment or inherited(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException as interruption:
        kill_with_descendants(process.pid)
        stdout, stderr = process.communicate(timeout=60)
        if not isinstance(interruption, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"{command} did not end within {timeout} s\n{stdout[-8000:]}\n{stderr[-8000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill_with_descendants(pid: int) -> None:
    """SIGKILL to a process and all that descend from it, whatever their process group: torchrun's workers lead sessions of their own."""
    pids = [pid]
    for parent in pids:  # grows: children, then theirs
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent, signal.SIGSTOP)  # so that it starts no further ones
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                pids += map(int, children.read_text().split())
    for each in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
