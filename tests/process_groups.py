"""Process groups of workers that run many cases in one launch."""

from __future__ import annotations

import gc

import torch.distributed as dist


def release_groups(*, all_groups: bool = True) -> None:
    """Free the process groups of a case; without ``all_groups`` only Megatron's, since vLLM keeps the groups of its first engine.

    Each gloo group has threads that poll every 10 ms. They end when nothing refers to the group any more, which destroying it does not
    bring about: Megatron-Core's global state and models in reference cycles keep it. Without this, thousands of threads slow down
    everything on the machine.
    """
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD] if all_groups else []
    for group in groups:
        dist.destroy_process_group(group)
    gc.collect()
