"""What test_launch.py and test_node.py run in each process: one way of ending, chosen by the argument."""

import os
import signal
import sys
import time
from pathlib import Path

from vapo_mcore.launch.local import become_stoppable, hand_exit_code, report_error
from vapo_mcore.launch.ranks import SiblingWatch, end_with_launcher


def main(how: str, folder: Path) -> int:
    rank = int(os.environ["RANK"])
    end_with_launcher()
    if how in ("leave", "finish"):
        watch = SiblingWatch(look_seconds=0.2, grace_seconds=1.5)
        watch.start()
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
    if how == "exit_3_alone" and rank == 1:
        return 3
    if how == "judge":
        return hand_exit_code(2)
    if how == "leave" and rank == 1:
        return 0
    if how == "finish":
        watch.stop()
        time.sleep(4.0 * rank)
        return 0
    if how != "fine":
        time.sleep(120)
    return 0


def _stop(_number: int, _frame: object) -> None:
    report_error("stopped after step 3", 75)
    sys.exit(75)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
