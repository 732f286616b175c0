"""Process groups of workers that run many cases in one launch."""

from __future__ import annotations

import torch.distributed as dist


def release_groups() -> None:
    """Shut down the process groups of a case: gloo keeps threads for each, thousands after all cases, which slow down the later ones."""
    dist.barrier()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
