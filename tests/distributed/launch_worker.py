"""What test_launch.py and test_node.py run in each process: one way of ending, chosen by the argument."""

import os
import signal
import sys
import time
from pathlib import Path

from vapo_mcore.launch.local import become_stoppable, report_error


def main(how: str, folder: Path) -> int:
    rank = int(os.environ["RANK"])
    if how == "stop":
        signal.signal(signal.SIGUSR1, _stop)
        become_stoppable()
    (folder / f"rank_{rank}").write_text(f"{os.environ['WORLD_SIZE']} {os.environ['MASTER_ADDR']} {os.environ['OMP_NUM_THREADS']}")
    if how == "same_error":
        time.sleep(0.3 * rank)
        report_error("the model is not there")
        return 2
    if how == "own_error" and rank == 1:
        report_error("a disk is full")
        return 2
    if how == "crash" and rank == 1:
        raise ValueError("a bug")
    if how == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit_3":
        return 3
    if how != "fine":
        time.sleep(120)
    return 0


def _stop(_number: int, _frame: object) -> None:
    report_error("stopped after step 3", 75)
    sys.exit(75)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
