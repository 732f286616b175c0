"""Parallel layout of this process: initialisation of torch.distributed and Megatron, and the degrees, ranks and groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vapo_mcore.errors import ConfigError
from vapo_mcore.megatron.devices import device_fault, installed_versions, transformer_engine_fault
from vapo_mcore.megatron.groups import MegatronGroups, second_layout
from vapo_mcore.megatron.host import HAS_CUDA, compute_device, import_megatron, megatron_scope

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config, ParallelConfig


@dataclass(frozen=True)
class ParallelContext:
    """One layout: parallel degrees, this process's ranks, and the process groups. Policy and critic share it, or have one each.

    Code of Megatron-Core that works on a model runs inside ``scope`` of the model's layout.

    Ranks are in Megatron's default order tp-cp-dp-pp: TP neighbours are contiguous. "Model parallel" are the TP x CP x PP ranks of one
    data-parallel index, which hold the same sequences. Experts have separate groups over the same ranks, in the order
    expert tensor - expert model - expert data - pipeline: the ranks of an expert-model group hold different sequences or parts of them.
    """

    world_size: int
    rank: int
    device: torch.device
    tensor_model_parallel_size: int
    tensor_model_parallel_rank: int
    tensor_model_parallel_group: dist.ProcessGroup
    pipeline_model_parallel_size: int
    pipeline_model_parallel_rank: int
    pipeline_model_parallel_group: dist.ProcessGroup
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    context_parallel_rank: int
    context_parallel_group: dist.ProcessGroup
    data_parallel_size: int
    data_parallel_rank: int
    data_parallel_group: dist.ProcessGroup
    data_context_parallel_group: dist.ProcessGroup
    expert_model_parallel_size: int
    expert_model_parallel_rank: int
    expert_model_parallel_group: dist.ProcessGroup
    expert_tensor_parallel_size: int
    expert_tensor_parallel_rank: int
    expert_tensor_parallel_group: dist.ProcessGroup
    sequence_parallel: bool
    equal_microbatches: bool
    groups: MegatronGroups
    other_layouts: dict[ParallelConfig, ParallelContext] = field(default_factory=dict)  # over the same ranks, made by critic_layout

    @contextmanager
    def scope(self, device: torch.device | None = None) -> Iterator[None]:
        """Run Megatron-Core code on a model of this layout: its groups are in Megatron's global state. ``device``: see megatron_scope."""
        with megatron_scope(device), self.groups.put_in_place():
            yield

    @property
    def variable_lengths(self) -> bool:
        """Return whether micro-batches differ in length, so that pipeline stages must exchange shapes.

        False with interleaved stages: with two of them both neighbours are the same rank, and Megatron's shape exchange confuses the two
        directions.
        """
        return self.virtual_pipeline_model_parallel_size is None and not self.equal_microbatches

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage of this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_model_parallel_group, self.pipeline_model_parallel_size - 1)

    @property
    def microbatch_group(self) -> int:
        """The number of micro-batches per rank must be a multiple of this: the pipeline size with interleaved stages, else 1."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1


def initialize_distributed(timeout_minutes: float) -> None:
    """Join the process group of torchrun's environment, or create a single-process group. Idempotent.

    Raises ConfigError if the GPUs or Transformer Engine are unusable or a restart by torchrun would hang.
    """
    if dist.is_initialized():
        return
    fault = device_fault(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if fault is not None:
        raise ConfigError(fault)
    if torch.version.cuda is not None and HAS_CUDA:
        fault = transformer_engine_fault(installed_versions(), torch.version.cuda)
        if fault is not None:
            raise ConfigError(f"Transformer Engine: {fault}")
    if HAS_CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if HAS_CUDA else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=_of_this_start(store), rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _of_this_start(store: dist.Store) -> dist.Store:
    """Return torchrun's store with a prefix per start, which hides the entries of earlier starts (``--max-restarts``).

    The store outlives the ranks, so after a restart a fast rank could read the address of a dead one. On several nodes each node counts
    its own starts, so the number is no common prefix, and torchrun must create a new store each time. Raises ConfigError if it would not.
    """
    nodes, start = int(os.environ.get("GROUP_WORLD_SIZE", "1")), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    restarts, shared = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if nodes > 1 and shared and int(restarts) > 0:
        raise ConfigError(
            f"torchrun --max-restarts={restarts} on {nodes} nodes: restarted ranks would connect to ranks of the previous start and hang; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes (with --rdzv-backend c10d), or --max-restarts=0"
        )
    return dist.PrefixStore(f"vapo_mcore/start_{start if nodes == 1 else 0}", store)


def initialize_parallel(config: ParallelConfig) -> ParallelContext:
    """Create Megatron's process groups for ``config`` and return the layout.

    Raises ConfigError if the number of processes differs from ``parallel.world_size``.
    """
    import_megatron()
    from megatron.core import parallel_state as ps

    initialize_distributed(config.timeout_minutes)
    if dist.get_world_size() != config.world_size:
        raise ConfigError(
            f"parallel.world_size = {config.world_size}, but {dist.get_world_size()} processes were started; make the two equal"
        )
    with megatron_scope():
        ps.destroy_model_parallel()
        parallel = _create(config)
        _seed_rng_tracker()
    return parallel


def critic_layout(config: Config, policy: ParallelContext) -> ParallelContext:
    """Return the critic's layout: the policy's or, with ``critic.parallel``, a second one over the same ranks. Collective.

    Megatron's RNG tracker keeps the policy's seeds: models have no dropout of Megatron's, and all weights come from files, so nothing
    draws from it.
    """
    if not config.layouts_differ:
        return policy
    if config.critic_parallel not in policy.other_layouts:
        with megatron_scope(), second_layout():
            policy.other_layouts[config.critic_parallel] = _create(config.critic_parallel)
    return policy.other_layouts[config.critic_parallel]


def _create(config: ParallelConfig) -> ParallelContext:
    """Create Megatron's process groups where there are none, and return the layout."""
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, int(config.timeout_minutes)),
        create_gloo_process_groups=False,
    )
    tp = config.tensor_model_parallel_size
    sequence_parallel = config.sequence_parallel if config.sequence_parallel is not None else tp > 1
    return ParallelContext(
        world_size=config.world_size,
        rank=dist.get_rank(),
        device=compute_device(),
        tensor_model_parallel_size=tp,
        tensor_model_parallel_rank=ps.get_tensor_model_parallel_rank(),
        tensor_model_parallel_group=ps.get_tensor_model_parallel_group(),
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        pipeline_model_parallel_rank=ps.get_pipeline_model_parallel_rank(),
        pipeline_model_parallel_group=ps.get_pipeline_model_parallel_group(),
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        context_parallel_rank=ps.get_context_parallel_rank(),
        context_parallel_group=ps.get_context_parallel_group(),
        data_parallel_size=ps.get_data_parallel_world_size(),
        data_parallel_rank=ps.get_data_parallel_rank(),
        data_parallel_group=ps.get_data_parallel_group(),
        data_context_parallel_group=ps.get_data_parallel_group(with_context_parallel=True),
        expert_model_parallel_size=ps.get_expert_model_parallel_world_size(),
        expert_model_parallel_rank=ps.get_expert_model_parallel_rank(),
        expert_model_parallel_group=ps.get_expert_model_parallel_group(),
        expert_tensor_parallel_size=ps.get_expert_tensor_parallel_world_size(),
        expert_tensor_parallel_rank=ps.get_expert_tensor_parallel_rank(),
        expert_tensor_parallel_group=ps.get_expert_tensor_parallel_group(),
        sequence_parallel=sequence_parallel and tp > 1,
        equal_microbatches=config.equal_microbatches,
        groups=MegatronGroups(),
    )


def _seed_rng_tracker() -> None:
    """Initialise Megatron's RNG tracker, which it requires even without dropout and with weights loaded from files."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234)
