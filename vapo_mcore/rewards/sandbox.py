"""Run a model-written program in a separate process with limited time, memory and system calls (see ``sandbox_child``)."""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_mcore.errors import RewardError
from vapo_mcore.rewards.sandbox_child import UNPROTECTED

MEMORY_BYTES = 2**30
"""Limit on the address space."""
MAX_OUTPUT_BYTES = 4 * 2**20

_CHILD = Path(__file__).with_name("sandbox_child.py")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Outcome:
    """Result of a program. ``finished``: it ended without an error and within its limits; its stdout; its results."""

    finished: bool
    stdout: bytes
    results: bytes


def run_program(job: Mapping[str, Any], stdin: str, seconds: float) -> Outcome:
    """Run a job of ``sandbox_child`` for at most ``seconds``.

    Raises:
        RewardError: this machine cannot restrict the process (no seccomp, or not x86-64); the program was not run.
        OSError: the process cannot be started.
    """
    limits = {"memory_bytes": MEMORY_BYTES, "cpu_seconds": math.ceil(seconds) + 1}
    with _memory_file(json.dumps({**job, "limits": limits})) as job_file, _memory_file(stdin) as stdin_file:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), str(job_file.fileno()), str(write)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(job_file.fileno(), write),
                cwd="/",
                env=_ENVIRONMENT,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        with os.fdopen(read, "rb", buffering=0) as results:
            return _watch(process, results, seconds)


def _watch(process: subprocess.Popen[bytes], results: Any, seconds: float) -> Outcome:
    deadline = time.monotonic() + seconds
    assert process.stdout is not None
    read: dict[Any, bytearray] = {process.stdout: bytearray(), results: bytearray()}
    within = True
    with selectors.DefaultSelector() as selector, process.stdout:
        for stream in read:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while within and selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                part = os.read(key.fd, 65536)
                if not part:
                    selector.unregister(key.fileobj)
                read[key.fileobj] += part
            within = time.monotonic() < deadline and sum(map(len, read.values())) <= MAX_OUTPUT_BYTES
        if within:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
        code = process.wait()
    if code == UNPROTECTED:
        raise RewardError("programs cannot be run safely on this machine: requires seccomp on x86-64 Linux")
    return Outcome(within and code == 0, bytes(read[process.stdout]), bytes(read[results]))


def _memory_file(text: str) -> Any:
    """Create a file in memory, positioned at its start, without a name that the program could open."""
    file = os.fdopen(os.memfd_create("input"), "w+b")
    file.write(text.encode("utf-8", "replace"))
    file.flush()
    file.seek(0)
    return file
