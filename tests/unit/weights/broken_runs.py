"""Conversions that die: ``broken_runs.py HF_FOLDER MEGATRON_FOLDER WORK`` prints ``ACTION CASE status N`` for each, in a process each.

``killed-N``: SIGKILL at the N-th tensor, ``killed-last``: just before the new folder takes its name, ``full-reserve`` and ``full-write``:
the disk has no room (a limit of the file size, which fails the same calls in the same places), noticed when space is reserved or,
on a file system that cannot reserve, while writing.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint.filesystem  # noqa: F401  (a conversion imports it: here once, not in each child)

from vapo_mcore.weights import command, convert, distcp, writer

SOURCES = {"hf-to-megatron": Path(sys.argv[1]), "megatron-to-hf": Path(sys.argv[2])}
WORK = Path(sys.argv[3])
SIZE_LIMIT = 20_000


def die(*_args: object, **_kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(tensors: int) -> Callable[[], None]:
    def prepare() -> None:
        passed = 0
        check = convert.require_finite

        def counted(*args: object) -> None:
            nonlocal passed
            passed += 1
            if passed == tensors:
                die()
            check(*args)  # type: ignore[arg-type]

        convert.require_finite = counted  # type: ignore[assignment]

    return prepare


def killed_before_the_name() -> None:
    writer.Path.rename = die  # type: ignore[method-assign,assignment]


def full_when_reserving() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE_LIMIT, resource.RLIM_INFINITY))


def full_when_writing() -> None:
    for module in (distcp, writer):
        module.os.posix_fallocate = lambda *_: None  # type: ignore[attr-defined]
    full_when_reserving()


CASES: dict[str, Callable[[], None]] = {
    "killed-1": killed_at(1),
    "killed-20": killed_at(20),
    "killed-last": killed_before_the_name,
    "full-reserve": full_when_reserving,
    "full-write": full_when_writing,
}

for action, source in SOURCES.items():
    for case, prepare in CASES.items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            prepare()
            sys.stderr = sys.stdout
            status = command.main([action, str(source), str(WORK / f"{action}-{case}")])
            sys.stdout.flush()
            os._exit(status)
        print(f"{action} {case} status {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
