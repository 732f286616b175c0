"""Process groups of workers that run many cases in one launch."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def share_gloo_device() -> None:
    """Make all gloo groups of this process, and of the processes it forks, share one network device per process.

    torch creates a device for each group, with a thread that polls every 10 ms and delays the group's end. Megatron-Core creates 27 groups
    for a layout, so that eight ranks on two cores spend much of their time on these threads.
    """
    from torch.distributed import distributed_c10d

    original = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []  # created with the first group: its thread does not survive a fork

    class SharedDevice(original):  # type: ignore[misc, valid-type]
        """A gloo group on the device of the first one."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = original._Options()
            if not devices:
                devices.append(original.create_default_device())
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    if not hasattr(original, "__wrapped__"):
        SharedDevice.__wrapped__ = original
        distributed_c10d.ProcessGroupGloo = SharedDevice  # type: ignore[misc]


def release_groups() -> None:
    """Free the process groups of a case.

    Each gloo group has threads, and one that polls every 10 ms if it has its own device. They end when nothing refers to the group any
    more, which destroying it does not bring about: Megatron-Core's global state and models in reference cycles keep it. Without this,
    thousands of threads slow down everything on the machine.
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
