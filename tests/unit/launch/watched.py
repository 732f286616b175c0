"""What test_watchdog.py runs in a process: ``watched.py RUN_DIR RANK WORLD_SIZE LIMIT HOW``; prints when it is done."""

import sys
import time
from pathlib import Path

from vapo_mcore import heartbeat
from vapo_mcore.launch.watchdog import Watchdog


def waits_for_ever() -> None:
    time.sleep(60)


def holds_the_interpreter() -> None:
    7 ** (10**9)  # one C call that takes minutes and lets no other thread run


def is_slow_but_alive(seconds: float) -> None:
    for _ in range(int(seconds / 0.1)):
        heartbeat.alive()
        time.sleep(0.1)


def main(run_dir: Path, rank: int, world_size: int, limit: float, how: str) -> None:
    with Watchdog(limit, rank=rank, world_size=world_size) as watchdog:
        if rank == 0:
            watchdog.clear(run_dir)
            (run_dir / "cleared").touch()
        while not (run_dir / "cleared").exists():
            time.sleep(0.01)
        watchdog.attach(run_dir)
        heartbeat.at_step("rl 7")
        with heartbeat.entering("policy_update"):
            if how == "wait":
                waits_for_ever()
            elif how == "hold":
                holds_the_interpreter()
            else:
                is_slow_but_alive(float(how))
        if how != "0" and rank == 1:
            waits_for_ever()
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
