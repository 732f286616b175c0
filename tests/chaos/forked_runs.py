"""Starts training runs quickly: imports everything once and forks a process for each run.

``python tests/chaos/forked_runs.py`` reads one JSON list of command-line arguments a line and answers with {"pid": n}, and with
{"status": n} when that process has ended (the exit code, or -signal). A run writes to the file that its first argument names.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    import torch

    import vapo_mcore.trainer.main
    from vapo_mcore.cli import main as command

    torch.set_num_threads(1)
    vapo_mcore.trainer.main.configure_logging()
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(log, arguments, command)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _run(log: str, arguments: list[str], command: object) -> None:
    """In the forked process; never returns."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 70
    try:
        code = command(arguments)  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 (whatever it is, it is in the log and the exit code says so)
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":  # the graders' processes import this file too
    main()
