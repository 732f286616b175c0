"""What test_ends.py runs in two processes: rank 1 dies or hangs while rank 0 waits for it in a collective. ``ends_worker.py HOW FOLDER``"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vapo_mcore import heartbeat
from vapo_mcore.launch.watchdog import Watchdog

LIMIT_SECONDS = 3.0


def waits_in_a_collective(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def main(how: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    elsewhere = dist.new_group()
    waits_in_a_collective(dist.group.WORLD)
    with Watchdog(LIMIT_SECONDS if how == "hang" else None, rank=rank, world_size=2) as watchdog:
        if rank == 0:
            watchdog.clear(folder)
        dist.barrier()
        watchdog.attach(folder)
        heartbeat.at_step("rl 3")
        with heartbeat.entering("policy_update"):
            (folder / f"began_{rank}").touch()
            if rank == 1 and how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            waits_in_a_collective(elsewhere if rank == 1 else dist.group.WORLD)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
