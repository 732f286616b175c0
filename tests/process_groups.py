"""Process groups of workers that run many cases in one launch."""

from __future__ import annotations

import gc
import sys

import torch.distributed as dist


def release_groups() -> None:
    """Free the process groups of a case.

    Each gloo group has threads that poll every 10 ms. They end when nothing refers to the group any more, which destroying it does not
    bring about: Megatron-Core's global state and models in reference cycles keep it. Without this, thousands of threads slow down
    everything on the machine.
    """
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    kept = [dist.group.WORLD, *_groups_of_vllm()]
    for group in [group for group in dist.distributed_c10d._world.pg_map if all(group is not other for other in kept)]:
        dist.destroy_process_group(group)
    gc.collect()


def _groups_of_vllm() -> list[dist.ProcessGroup]:
    """Return the groups over all ranks that vLLM keeps from its first engine and uses for the next ones in this process."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    world = None if state is None else state._WORLD
    return [] if world is None else [world.device_group, world.cpu_group]
