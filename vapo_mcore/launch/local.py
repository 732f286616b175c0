"""Run the ranks on this machine with torchrun's elastic agent in the launching process, and print each error once.

A worker that stops with a ``VapoError`` writes its message and exit code to a folder that the launcher reads. The launcher prints an error
of all ranks once, and an error of some ranks with their numbers. ``node.py`` does the same around torchrun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vapo_mcore.errors import EXIT_HANG, EXIT_REQUEUE
from vapo_mcore.interrupts import importing, report_interrupted
from vapo_mcore.launch.environment import process_defaults

ERRORS_VARIABLE = "VAPO_MCORE_ERRORS"  # folder for the workers' error messages, set by the launcher
LAUNCHER_VARIABLE = "VAPO_MCORE_LAUNCHER"  # process id of the launcher, for its workers
_WAIT_FOR_OTHERS_SECONDS = 2.0
SECONDS_BEFORE_KILL = 30.0  # between SIGTERM and SIGKILL, when the agent ends the workers after one has failed; torch's default
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
_STOPPABLE = "stoppable_"  # prefix of a file in the folder, followed by the worker's process id


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def become_single_process() -> None:
    """Set the environment variables that torchrun sets for a single process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})


def launch(module: str, arguments: list[str], processes: int) -> int:
    """Run ``python -m module arguments`` in ``processes`` processes and return the exit code of the run.

    Forwards SIGTERM and SIGUSR1 to workers that train; they save and exit without a time limit, and their exit code is the result.
    Before training, and for other signals, the workers are killed within 30 s and the result is 128 + signal. If a worker fails, the
    others are killed and its exit code is the result. Workers die with the launcher, however it ends (launch/ranks.py).
    """
    with importing():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its reports repeat the workers' messages
    logging.getLogger("torch.numa").setLevel(logging.CRITICAL)  # prints a traceback without numactl; the doctor reports that
    os.environ.update(process_defaults(processes))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # the others are handled here
    )
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_errors_") as folder:
        os.environ[ERRORS_VARIABLE] = folder
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        try:
            _pass_signals_on(Path(folder), processes)
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
            handed = read_errors(Path(folder))  # exit codes of a command whose ranks recorded their results
            return exit_code_of([error.exit_code for error in handed.values()]) if handed else 0
        except ChildFailedError as error:
            first = min(failure.timestamp for failure in error.failures.values())
            exits = {rank: (failure.exitcode, failure.timestamp - first) for rank, failure in error.failures.items()}
            return _report(Path(folder), exits, processes)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                report_interrupted()
            return 128 + int(stopped.sigval)
        finally:
            for number in _PASSED_ON:
                signal.signal(number, signal.SIG_DFL)
            for name in (ERRORS_VARIABLE, LAUNCHER_VARIABLE):
                os.environ.pop(name, None)


def _pass_signals_on(folder: Path, processes: int) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    def pass_on(number: int, _frame: object) -> None:
        workers = stoppable_workers(folder)
        if len(workers) < processes:
            raise SignalException(f"the launcher got signal {number} before all workers were training", sigval=signal.Signals(number))
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)


def stoppable_workers(folder: Path) -> list[int]:
    """Return the process ids of the workers that have called ``become_stoppable``, from the launcher's folder."""
    return [int(path.name.removeprefix(_STOPPABLE)) for path in folder.glob(f"{_STOPPABLE}*")]


def become_stoppable() -> None:
    """Notify the launcher, if any, that this worker handles the signals of ``_PASSED_ON`` itself."""
    folder = os.environ.get(ERRORS_VARIABLE)
    if folder is not None and Path(folder).is_dir():
        (Path(folder) / f"{_STOPPABLE}{os.getpid()}").touch()


def _report(folder: Path, exits: dict[int, tuple[int, int]], processes: int) -> int:
    """Print the workers' messages and return the run's exit code.

    ``exits``: exit code of each failed worker, and seconds between the first worker's end and its own. A worker that was killed because
    another failed has -SIGTERM, or -SIGKILL if it did not react; it is named only if nothing else failed. A hang takes precedence over
    the codes of the ranks killed with it, and any failure over a clean stop.
    """
    reported = read_errors(folder)
    print_errors(reported, processes)
    collateral = {
        rank
        for rank, (code, later) in exits.items()
        if code == -signal.SIGTERM or (code == -signal.SIGKILL and later >= SECONDS_BEFORE_KILL / 2)
    }
    failed = {rank: code for rank, (code, _) in sorted(exits.items()) if rank not in collateral or len(collateral) == len(exits)}
    for code in dict.fromkeys(failed.values()):
        silent = [str(rank) for rank, other in failed.items() if other == code and rank not in reported]
        if silent:
            whose = f"process of rank {silent[0]}" if len(silent) == 1 else f"processes of ranks {', '.join(silent)}"
            was = "was" if len(silent) == 1 else "were"
            how = f"ended with exit code {code}" if code > 0 else f"{was} ended by signal {signal.Signals(-code).name}"
            print(f"error: the {whose} {how}", file=sys.stderr)
    return exit_code_of(failed.values())


@dataclass(frozen=True)
class WorkerError:
    """Error of one rank; the message is empty if the rank has already printed it."""

    message: str
    exit_code: int


def read_errors(folder: Path) -> dict[int, WorkerError]:
    """Read the errors that the ranks wrote to the folder of ``VAPO_MCORE_ERRORS``, by rank."""
    errors = {}
    for path in sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)):
        code, _, message = path.read_text(encoding="utf-8").partition("\n")
        errors[int(path.name)] = WorkerError(message, int(code))
    return errors


def exit_code_of(codes: Iterable[int]) -> int:
    """Return the most severe of the ranks' exit codes (-N: killed by signal N)."""
    code = max(codes, key=_weight)
    return code if code > 0 else 128 - code


def _weight(code: int) -> tuple[int, int]:
    """Rank exit codes by severity: a hang, then signals, other codes, a reported error, a crash, a clean stop."""
    if code == EXIT_HANG:
        return 5, 0
    if code == EXIT_REQUEUE:
        return 0, 0
    return 4 if code < 0 else min(code, 3), abs(code)


def print_errors(errors: dict[int, WorkerError], processes: int) -> None:
    """Print each distinct message once, with the ranks that reported it unless all did."""
    for error in dict.fromkeys(errors[rank] for rank in sorted(errors) if errors[rank].message):
        ranks = [rank for rank, other in sorted(errors.items()) if other == error]
        same_everywhere = len(ranks) == processes
        where = "" if same_everywhere else f" (rank {', '.join(map(str, ranks))})"
        print(f"{_label(error.exit_code)}{where}: {error.message}", file=sys.stderr)


def _label(exit_code: int) -> str:
    """Return the prefix of a line on stderr; a clean stop is not an error."""
    return "stopped" if exit_code == EXIT_REQUEUE else "error"


def report_error(message: str, exit_code: int = 2) -> None:
    """Report the error that ends this process with ``exit_code``, through the launcher if there is one, else on stderr."""
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    folder = os.environ.get(ERRORS_VARIABLE)
    if folder is None or not Path(folder).is_dir():
        where = f" (rank {rank})" if rank else ""
        print(f"{_label(exit_code)}{where}: {message}", file=sys.stderr, flush=True)
        return
    _leave(Path(folder), rank, WorkerError(message, exit_code))
    # The agent kills the other workers as soon as one ends: wait for those with the same error to report it.
    deadline = time.monotonic() + _WAIT_FOR_OTHERS_SECONDS
    while sum(path.name.isdigit() for path in Path(folder).iterdir()) < processes and time.monotonic() < deadline:
        time.sleep(0.05)


def hand_exit_code(code: int) -> int:
    """Return the exit code of this rank for a command that has already printed its result, ``code`` on all ranks.

    torchrun turns every nonzero code into 1 and prints a traceback. If our launcher collects the codes, ``code`` is written for it and
    torchrun gets 0.
    """
    folder = os.environ.get(ERRORS_VARIABLE)
    if code == 0 or folder is None or not Path(folder).is_dir():
        return code
    _leave(Path(folder), int(os.environ["RANK"]), WorkerError("", code))
    return 0


def _leave(folder: Path, rank: int, error: WorkerError) -> None:
    unfinished = folder / f".{rank}"
    unfinished.write_text(f"{error.exit_code}\n{error.message}", encoding="utf-8")
    unfinished.rename(folder / str(rank))
