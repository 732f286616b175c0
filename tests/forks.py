"""Start test processes by forking a server that has imported everything: a start takes milliseconds instead of 5 s of imports.

``run_ranks`` runs a worker script as the ranks of a run, with torchrun's environment; ``run_script`` runs it in one process; ``Forks``
starts any program of this repository. Tests of torchrun and of the command line itself start those instead (tests/torchrun.py).
``fake_cuda``: on fake CUDA devices (tests/fake_cuda), which the server of such processes installs before it imports anything else.

There are two servers, one for even and one for odd ranks, with different seeds of Python's hash, so that the iteration order of a set
cannot agree on all ranks by chance. ``python tests/forks.py`` is a server: it reads one JSON request per line, responds with {"pid": n},
and writes the process's exit code (or -signal) to the request's "status" file when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_END = 30
"""Time between a rank's failure, when the others get SIGTERM, and SIGKILL; the same as torchrun's."""


@dataclass(frozen=True)
class Forked:
    """A forked process, which leads its own process group."""

    pid: int
    status_file: Path

    @property
    def status(self) -> int | None:
        """Exit code, -signal, or None while the process runs."""
        return int(self.status_file.read_text()) if self.status_file.exists() else None

    def wait(self, timeout: float) -> int:
        """Return the status. Raises AssertionError if the process still runs after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.status) is None:
            assert time.monotonic() < deadline, f"process {self.pid} did not end within {timeout} s"
            time.sleep(0.02)
        return status

    def signal_all(self, number: int) -> None:
        """Send a signal to the process and all its children."""
        with contextlib.suppress(ProcessLookupError):  # all have exited
            os.killpg(self.pid, number)


class Forks:
    """A server process and the processes it forks."""

    def __init__(self, *, fake_cuda: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vapo_mcore_forks_")
        self._count = 0
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *(["fake_cuda"] if fake_cuda else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=inherited(),
            start_new_session=True,
        )

    def start(self, command: Sequence[str], stdout: Path, stderr: Path, environment: Mapping[str, object]) -> Forked:
        """Start ``command``: a script with arguments, or "-m", module and arguments. Its output is appended to the files."""
        with self._lock:
            return self._start(list(command), stdout, stderr, inherited() | {name: str(value) for name, value in environment.items()})

    def _start(self, command: list[str], stdout: Path, stderr: Path, environment: dict[str, str]) -> Forked:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._count += 1
        status = Path(self._folder.name) / str(self._count)
        files = {"stdout": str(stdout), "stderr": str(stderr), "status": str(status)}
        self._server.stdin.write(json.dumps({"command": command, "environment": environment, **files}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the fork server has exited"
        return Forked(int(json.loads(answer)["pid"]), status)

    def close(self) -> None:
        """Stop the server, which kills the processes it forked."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(timeout=60)
        finally:
            if self._server.poll() is None:
                os.killpg(self._server.pid, signal.SIGKILL)
        self._folder.cleanup()


def inherited() -> dict[str, str]:
    """Return the environment of test processes."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@functools.cache
def servers(*, fake_cuda: bool = False) -> tuple[Forks, Forks]:
    """Return the two servers, which all tests of this process share (one server for both with fake CUDA devices)."""
    first = Forks(fake_cuda=fake_cuda)
    both = first, first if fake_cuda else Forks()
    for server in dict.fromkeys(both):
        atexit.register(server.close)
    return both


def run_ranks(
    script: str | Path, nproc: int, *args: str, timeout: float = 180, fake_cuda: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` (relative to the repository or absolute) as ``nproc`` ranks. Returns their joint output, and 0 or the first failure.

    When a rank fails, the others are terminated. After ``timeout`` seconds all are killed and the test fails with the output so far.
    """
    return _run_ranks([str(ROOT / script), *args], nproc, timeout, fake_cuda)


def _run_ranks(command: list[str], nproc: int, timeout: float, fake_cuda: bool) -> subprocess.CompletedProcess[str]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # in this process, like torchrun's in its agent
    world = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    return _run(command, [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in range(nproc)], timeout, fake_cuda)


def run_script(script: str | Path, *args: str, timeout: float = 180, fake_cuda: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in one process without torchrun's environment. Returns like :func:`run_ranks`."""
    return _run([str(ROOT / script), *args], [{}], timeout, fake_cuda)


def run_command(*args: str, nproc: int | None = None, timeout: float = 180, fake_cuda: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``vapo-mcore`` in one process, or as ``nproc`` ranks without its launcher. Returns like :func:`run_ranks`."""
    program = ["tests.fake_cuda", "vapo_mcore.cli"] if fake_cuda else ["vapo_mcore.cli"]
    if nproc is None:
        return _run(["-m", *program, *args], [{}], timeout, fake_cuda)
    return _run_ranks(["-m", *program, *args], nproc, timeout, fake_cuda)


def _run(
    command: list[str], environments: list[dict[str, object]], timeout: float, fake_cuda: bool = False
) -> subprocess.CompletedProcess[str]:
    """Start one process per environment, alternating between the servers, and wait for all."""
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_output_") as folder:
        files = Path(folder) / "stdout", Path(folder) / "stderr"
        processes: list[Forked] = []
        status = None
        try:
            for number, environment in enumerate(environments):
                processes.append(servers(fake_cuda=fake_cuda)[number % 2].start(command, *files, environment))
            status = _wait(processes, timeout)
        finally:
            for process in processes:
                process.signal_all(signal.SIGKILL)
        for process in processes:
            process.wait(60)
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    if status is None:
        raise AssertionError(f"{command} in {len(processes)} processes did not end within {timeout} s\n{stdout[-8000:]}\n{stderr[-8000:]}")
    return subprocess.CompletedProcess(command, status, stdout, stderr)


def _wait(processes: list[Forked], timeout: float) -> int | None:
    """Return 0 or the status of the first failure; None on a timeout. Stops waiting SECONDS_TO_END after a failure."""
    deadline, first = time.monotonic() + timeout, 0
    while time.monotonic() < deadline:
        statuses = [process.status for process in processes]
        if first == 0 and any(statuses):
            first = next(status for status in statuses if status)
            deadline = time.monotonic() + SECONDS_TO_END
            for process in processes:
                process.signal_all(signal.SIGTERM)
        if None not in statuses:
            return first
        time.sleep(0.02)
    return first or None


def _serve() -> list[str]:
    """Run the server loop. Returns only in forked processes, with their command."""
    children: dict[int, str] = {}
    pending = ""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02 if children else None)
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            unfinished = Path(children[ended[0]] + ".unfinished")
            unfinished.write_text(str(os.waitstatus_to_exitcode(ended[1])))
            unfinished.rename(children.pop(ended[0]))
        if not readable:
            continue
        if not (text := os.read(0, 65536).decode()):
            for child in children:
                os.killpg(child, signal.SIGKILL)
            os._exit(0)
        *lines, pending = (pending + text).split("\n")
        for line in lines:
            request = json.loads(line)
            assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
            pid = os.fork()
            if pid == 0:
                return _become(request)
            with contextlib.suppress(PermissionError, ProcessLookupError):  # the child did it first
                os.setpgid(pid, pid)
            children[pid] = request["status"]
            print(json.dumps({"pid": pid}), flush=True)


def _become(request: dict[str, Any]) -> list[str]:
    os.setpgid(0, 0)
    output = [os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("stdout", "stderr")]
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output[0], 1), (output[1], 2)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["environment"])
    return list(request["command"])


def _import_everything() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it once
    if sys.argv[1:] == ["fake_cuda"]:
        from tests import fake_cuda

        fake_cuda.install()
    from vapo_mcore.megatron.host import import_megatron

    import_megatron()
    import torch
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # noqa: F401

    import vapo_mcore.megatron.engine
    import vapo_mcore.trainer.main  # noqa: F401
    from tests.process_groups import share_gloo_device

    share_gloo_device()
    torch.set_num_threads(1)


def _run_to_its_end(command: list[str]) -> None:
    """Run the program and exit like Python, but without destroying modules, which would copy their memory pages first."""
    code = 0
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], str(ROOT)
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (print any exception and set the exit code)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _import_everything()
    gc.freeze()  # otherwise a garbage collection in a forked process would copy all pages
    _run_to_its_end(_serve())
