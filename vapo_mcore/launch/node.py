"""Wrapper of torchrun that Slurm starts once per node: ``python -m vapo_mcore.launch.node [--directory DIR] torchrun ...``.

torchrun alone is not sufficient. Slurm sends its warning signal only to the processes it has started, so it would kill torchrun and not
reach the ranks; and torchrun exits with 1 regardless of its workers' exit codes. This process forwards SIGUSR1 and SIGTERM to the ranks
once all of them can stop cleanly (before that it terminates torchrun), prints each error of the ranks once and exits with their exit
code: 75 requests that the job is requeued (docs/cluster.md). It also sets the variables of ``launch/environment.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from vapo_mcore.errors import EXIT_REQUEUE
from vapo_mcore.launch.environment import node_defaults, raise_locked_memory
from vapo_mcore.launch.local import ERRORS_VARIABLE, exit_code_of, print_errors, read_errors, stoppable_workers
from vapo_mcore.launch.ranks import ranks_below


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code of the job on this node."""
    parser = argparse.ArgumentParser(prog="python -m vapo_mcore.launch.node", description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="working directory of the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="torchrun and its arguments")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("give the command to run")
    if options.directory is not None and not options.directory.is_dir():
        print(f"error: the working directory {options.directory} does not exist on node {os.uname().nodename}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_errors_") as folder:
        return _run(options.command, options.directory, Path(folder))


def _run(command: list[str], directory: Path | None, folder: Path) -> int:
    terminated_by: list[int] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited by torchrun; the ranks install their own handlers
    raise_locked_memory()
    environment = {**os.environ, **node_defaults(command), ERRORS_VARIABLE: str(folder)}
    try:
        process = subprocess.Popen(command, cwd=directory, env=environment)
    except OSError as error:
        print(f"error: {command[0]!r} cannot be started on node {os.uname().nodename}: {error.strerror}", file=sys.stderr)
        return 2

    def pass_on(number: int, _frame: FrameType | None) -> None:
        ranks, stoppable = ranks_below(process.pid), stoppable_workers(folder)
        if ranks and set(ranks) <= set(stoppable):
            for rank in ranks:
                _send(rank, number)
        else:  # the ranks have nothing to save yet
            terminated_by.append(number)
            process.terminate()

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = process.wait()
    errors = read_errors(folder)
    if code == 0 and not errors:
        return 0
    print_errors(errors, len(errors))
    if errors:
        return exit_code_of(error.exit_code for error in errors.values())
    if terminated_by:
        return EXIT_REQUEUE if terminated_by[0] == signal.SIGUSR1 else 128 + terminated_by[0]
    return code if code > 0 else 128 - code


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
        os.kill(process, number)


if __name__ == "__main__":
    sys.exit(main())
