"""Run a script in several processes under torchrun, bounded in time.

``run_torchrun("tests/distributed/worker.py", 4, "argument")`` returns the finished process with its output; whether it
must have exited with 0 is the test's to say. After ``timeout`` seconds the whole process group is killed and the test fails
with the output up to there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.forks import ROOT, inherited


def run_torchrun(script: str | Path, nproc: int, *args: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    """``script`` is relative to the repository or absolute; a free port is chosen; stdout and stderr are captured as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1", str(ROOT / script), *args]
    return run_bounded(command, timeout=timeout)


def run_bounded(
    command: list[str], *, timeout: float, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in a process group of its own, which is killed as a whole when the time is over. ``environment`` replaces ours."""
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
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        if not isinstance(interruption, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"{command} did not end within {timeout} s\n{stdout[-8000:]}\n{stderr[-8000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
