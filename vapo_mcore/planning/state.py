"""Compute the bytes of weights, gradients and optimizer state of every rank from the configuration. Does not import torch.

Replicates two conventions of Megatron-Core, tested against its buffers: the order of a chunk's parameters, and their layout in the buffers
of the distributed optimizer (``_ParamAndGradBuffer``): parameters in reverse order, each starting at a multiple of 64 elements, buckets
padded to a multiple of the data-parallel size, each rank owning an equal part of every bucket. ``plan`` builds the real models; this
module serves the checks before a model loads, and the search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol

from vapo_mcore.config.architecture import ModelArchitecture, new_critic, padded_vocab_size

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config, ParallelConfig

Role = Literal["policy", "critic"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # gradients are accumulated and reduced in float32
CPU_OPTIMIZER_BYTES = 16  # of an element with an optimizer on the CPU: main parameter, two moments and the gradient's copy, all float32
_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_MIN_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000  # Megatron's default bucket size, where reduction overlaps the backward pass


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rank: its elements, bytes per element, and whether two pipeline stages share it (it gets a separate bucket)."""

    name: str
    numel: int
    item_bytes: int
    shared_embedding: bool = False

    @property
    def is_expert(self) -> bool:
        """Return whether the parameter belongs to an expert."""
        return ".experts." in self.name


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a model's parts on one rank, named as in ``megatron.offload.RESIDENCY``.

    ``host``: host memory of a CPU optimizer (``cpu_offload``); ``optimizer`` is then 0. ``frozen``: the part of ``params`` without
    gradients, which Megatron leaves out of its buffers.
    """

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    host: int = 0
    frozen: int = 0

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(StateBytes)))


@dataclass(frozen=True)
class FlatBuffer:
    """A flat buffer of parameters of one dtype: the range of each parameter, and the buckets (start, end), including padding.

    ``experts``: it holds experts, which have separate buffers, sharded over expert-data parallelism.
    """

    item_bytes: int
    ranges: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]
    experts: bool = False

    @property
    def numel(self) -> int:
        return self.buckets[-1][1]

    def optimizer_bytes(self, *, cpu_offload: bool) -> int:
        """Return the optimizer bytes per element: two float32 moments, and a float32 main copy unless the parameter is float32.

        A CPU optimizer always has a main copy, and a copy of the gradient.
        """
        return CPU_OPTIMIZER_BYTES if cpu_offload else 8 if self.item_bytes == 4 else 12

    def shard_numels(self, ranks: int) -> list[int]:
        """Return the parameter elements (without padding) in each rank's shards of all buckets, which have optimizer state."""
        shards = [0] * ranks
        for start, end in self.buckets:
            share = (end - start) // ranks
            for low, high in self.ranges:
                first, last = max(low, start), min(high, end)
                if first >= last:
                    continue
                for rank in range((first - start) // share, (last - 1 - start) // share + 1):
                    shards[rank] += min(last, start + (rank + 1) * share) - max(first, start + rank * share)
        return shards


class Degrees(Protocol):
    """Parallel degrees of a layout, from a configuration or from the running processes."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int | None: ...


@dataclass(frozen=True)
class ShardGroups:
    """Distribution of a buffer's optimizer state over the ranks of a data x context parallel group.

    ``data``: size of that group; ``tp``: ranks of the tensor-parallel group; ``copy``: ranks that hold one copy of the experts of a stage;
    ``experts_apart``: whether there is expert parallelism.
    """

    data: int
    tp: int
    copy: int
    experts_apart: bool

    @classmethod
    def of(cls, parallel: Degrees) -> ShardGroups:
        expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        data = parallel.data_parallel_size * parallel.context_parallel_size
        ranks = parallel.expert_model_parallel_size
        return cls(data, parallel.tensor_model_parallel_size, expert_tp * ranks, ranks > 1)

    def size(self, *, experts: bool) -> int:
        """Return the number of ranks that share the optimizer state of a buffer."""
        return max(1, self.data * self.tp // self.copy) if experts else self.data

    def numels(self, buffer: FlatBuffer) -> list[int]:
        """Return the parameter elements of each rank's shards of the buffer; the largest of its tensor-parallel ranks."""
        shards = buffer.shard_numels(self.size(experts=buffer.experts))
        if not buffer.experts:
            return shards
        return [max(shards[(rank * self.tp + neighbour) // self.copy] for neighbour in range(self.tp)) for rank in range(self.data)]


def layer_parameters(
    arch: ModelArchitecture, tp: int, item_bytes: int, *, expert_ranks: int = 1, expert_tp: int | None = None
) -> list[Parameter]:
    """Return the parameters of one transformer layer on one tensor-parallel rank, in Megatron's order.

    ``expert_ranks``: expert-parallel ranks that share the experts; ``expert_tp``: ranks that share each of them (None: ``tp``).
    """
    hidden, head = arch.hidden_size, arch.head_dim
    q, kv = arch.num_attention_heads * head, arch.num_key_value_heads * head
    sizes: list[tuple[str, int]] = [("input_layernorm.weight", hidden), ("self_attention.linear_proj.weight", hidden * q // tp)]
    if arch.attention_output_bias:
        sizes.append(("self_attention.linear_proj.bias", hidden))
    sizes.append(("self_attention.linear_qkv.weight", (q + 2 * kv) // tp * hidden))
    if arch.qkv_bias:
        sizes.append(("self_attention.linear_qkv.bias", (q + 2 * kv) // tp))
    if arch.qk_norm:
        sizes += [("self_attention.q_layernorm.weight", head), ("self_attention.k_layernorm.weight", head)]
    sizes.append(("pre_mlp_layernorm.weight", hidden))
    if arch.is_moe:
        assert arch.num_experts is not None and arch.moe_ffn_hidden_size is not None
        sizes.append(("mlp.router.weight", arch.num_experts * hidden))
        ffn = arch.moe_ffn_hidden_size // (expert_tp or tp)
        for expert in range(arch.num_experts // expert_ranks):
            prefix = f"mlp.experts.local_experts.{expert}"
            sizes += [(f"{prefix}.linear_fc1.weight", 2 * ffn * hidden), (f"{prefix}.linear_fc2.weight", ffn * hidden)]
    else:
        ffn = arch.ffn_hidden_size // tp
        sizes += [("mlp.linear_fc1.weight", 2 * ffn * hidden), ("mlp.linear_fc2.weight", ffn * hidden)]
    return [Parameter(name, numel, item_bytes) for name, numel in sizes]


def chunk_parameters(
    arch: ModelArchitecture, role: Role, dtype: str, parallel: ParallelConfig, *, first: bool, last: bool
) -> list[Parameter]:
    """Return the parameters of one model chunk on one rank, in Megatron's order. ``first``/``last``: with embedding / head."""
    item, tp = ITEM_BYTES[dtype], parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    table = padded_vocab_size(arch.vocab_size, tp) // tp * arch.hidden_size
    tied = arch.tie_word_embeddings and role == "policy"
    parameters = []
    if first:
        parameters.append(Parameter("embedding.word_embeddings.weight", table, item, shared_embedding=tied and not last))
    layer = layer_parameters(
        arch, tp, item, expert_ranks=parallel.expert_model_parallel_size, expert_tp=parallel.expert_tensor_parallel_size
    )
    for number in range(arch.num_layers // stages):
        parameters += [Parameter(f"decoder.layers.{number}.{p.name}", p.numel, item) for p in layer]
    if last:
        parameters.append(Parameter("decoder.final_layernorm.weight", arch.hidden_size, item))
        if role == "critic":
            parameters += [Parameter(f"output_layer.{name}", numel, 4) for name, numel in _value_head(arch)]
        elif not (tied and first):
            parameters.append(Parameter("output_layer.weight", table, item, shared_embedding=tied))
    return parameters


def _value_head(arch: ModelArchitecture) -> list[tuple[str, int]]:
    """Return names and elements of a critic's head, which is replicated over tensor parallelism."""
    hidden = arch.hidden_size
    last = [("weight", arch.value_outputs * hidden), ("bias", arch.value_outputs)]
    return [*last, ("dense.weight", hidden * hidden), ("dense.bias", hidden)] if arch.mlp_value_head else last


def chunk_buffers(parameters: Sequence[Parameter], groups: ShardGroups, bucket_size: int | None) -> list[FlatBuffer]:
    """Return Megatron's buffers of a chunk's parameters.

    With expert parallelism experts have separate buffers, which come last and are sharded over expert-data parallelism.
    """
    dense = [parameter for parameter in parameters if not (groups.experts_apart and parameter.is_expert)]
    experts = [parameter for parameter in parameters if groups.experts_apart and parameter.is_expert]
    buffers = flat_buffers(dense, groups.size(experts=False), bucket_size)
    return buffers + [replace(buffer, experts=True) for buffer in flat_buffers(experts, groups.size(experts=True), bucket_size)]


def flat_buffers(parameters: Sequence[Parameter], ranks: int, bucket_size: int | None) -> list[FlatBuffer]:
    """Return Megatron's buffers of these parameters, one per dtype, in order of first appearance.

    ``ranks``: data x context parallel size, over which the distributed optimizer shards them. ``bucket_size`` None: one bucket.
    """
    by_type: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        by_type.setdefault(parameter.item_bytes, []).append(parameter)
    return [_flat_buffer(group, item_bytes, ranks, bucket_size) for item_bytes, group in by_type.items()]


def _flat_buffer(parameters: Sequence[Parameter], item_bytes: int, ranks: int, bucket_size: int | None) -> FlatBuffer:
    bucket_multiple = math.lcm(ranks, _BUCKET_ALIGNMENT)
    ranges: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = position = 0
    filled = False

    def close(end: int) -> None:
        nonlocal bucket_start, position, filled
        end = _round_up(end, bucket_multiple)
        buckets.append((bucket_start, end))
        bucket_start, position, filled = end, end, False

    for parameter in reversed(parameters):
        position = _round_up(position, _PARAMETER_ALIGNMENT)
        if parameter.shared_embedding and filled:
            close(position)
        start, position, filled = position, position + parameter.numel, True
        ranges.append((start, position))
        if parameter.shared_embedding or (bucket_size is not None and position - bucket_start >= bucket_size):
            close(position)
    if filled:
        close(position)
    return FlatBuffer(item_bytes, tuple(ranges), tuple(buckets))


def _bucket_size(ranks: int) -> int:
    return max(_MIN_BUCKET, _BUCKET_PER_RANK * ranks)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def stage_chunks(arch: ModelArchitecture, role: Role, dtype: str, parallel: ParallelConfig, stage: int) -> Iterator[list[Parameter]]:
    """Yield the parameters of every model chunk (one, or one per virtual stage) of a pipeline rank."""
    pp, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    for number in range(virtual):
        first, last = stage == 0 and number == 0, stage == pp - 1 and number == virtual - 1
        yield chunk_parameters(arch, role, dtype, parallel, first=first, last=last)


def cpu_offload(config: Config, role: Role) -> bool:
    """Return whether the model's optimizer is on the CPU."""
    return bool(getattr(config, role).optimizer.cpu_offload)


def trains_head_only(config: Config, role: Role) -> bool:
    """Return whether the run trains only the value head: value pretraining without RL, of a critic with a frozen trunk."""
    pretraining = config.critic.value_pretraining
    return role == "critic" and config.run.steps == 0 and pretraining.max_steps > 0 and pretraining.head_only


def refreshes_critic(config: Config) -> bool:
    """Return whether the critic is rebuilt between value pretraining and RL (``megatron.roles.refresh_critic``)."""
    pretraining = config.critic.value_pretraining
    trains_both = config.uses_critic and pretraining.max_steps > 0 and config.run.steps > 0
    return trains_both and (pretraining.lr is not None or pretraining.head_only)


def _trained(parameters: Sequence[Parameter], head_only: bool) -> list[Parameter]:
    """Return the parameters that have gradients: all, or those of a critic's head."""
    return [parameter for parameter in parameters if not head_only or parameter.name.startswith("output_layer.")]


def _num_bytes(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.numel * parameter.item_bytes for parameter in parameters)


def model_state(
    arch: ModelArchitecture,
    role: Role,
    dtype: str,
    parallel: ParallelConfig,
    *,
    stage: int,
    overlap: bool,
    cpu_offload: bool = False,
    head_only: bool = False,
) -> list[StateBytes]:
    """Compute the state of one model on one pipeline rank, by rank of the data x context parallel group (shards differ by padding).

    ``overlap``: gradient reduction overlaps the backward pass (on GPUs), which splits the first stage's buffer into buckets.
    ``cpu_offload``: the optimizer is on the CPU. ``head_only``: the trunk is frozen.
    """
    groups = ShardGroups.of(parallel)
    buffers: list[FlatBuffer] = []
    frozen = 0
    for number, parameters in enumerate(stage_chunks(arch, role, dtype, parallel, stage)):
        bucketed = overlap and stage == 0 and number == 0
        trained = _trained(parameters, head_only)
        frozen += _num_bytes(parameters) - _num_bytes(trained)
        buffers += chunk_buffers(trained, groups, _bucket_size(groups.data) if bucketed else None)
    params = frozen + sum(buffer.numel * buffer.item_bytes for buffer in buffers)
    grads = sum(buffer.numel * GRADIENT_BYTES for buffer in buffers)
    return states_by_data_rank(params, grads, buffers, groups, cpu_offload=cpu_offload, frozen=frozen)


def configured_state(config: Config, arch: ModelArchitecture, role: Role, *, stage: int, overlap: bool) -> list[StateBytes]:
    """Compute :func:`model_state` with the run's settings."""
    return model_state(
        arch,
        role,
        config.model.dtype,
        config.parallel_of(role),
        stage=stage,
        overlap=overlap,
        cpu_offload=cpu_offload(config, role),
        head_only=trains_head_only(config, role),
    )


def states_by_data_rank(
    params: int, grads: int, buffers: Iterable[FlatBuffer], groups: ShardGroups, *, cpu_offload: bool, frozen: int = 0
) -> list[StateBytes]:
    """Combine the bytes of parameters and gradients, equal on all ranks of the group, with each rank's optimizer bytes."""
    held = [0] * groups.data
    for buffer in buffers:
        each = buffer.optimizer_bytes(cpu_offload=cpu_offload)
        held = [before + each * shard for before, shard in zip(held, groups.numels(buffer), strict=True)]
    return [StateBytes(params, grads, 0, mine, frozen) if cpu_offload else StateBytes(params, grads, mine, frozen=frozen) for mine in held]


def snapshot_bytes(
    arch: ModelArchitecture, role: Role, dtype: str, parallel: ParallelConfig, *, stage: int, overlap: bool, head_only: bool = False
) -> list[int]:
    """Compute the host memory of one model's checkpoint copy, by rank of the data x context parallel group.

    ``checkpoint.strategies.SnapshotSave`` keeps the copy between saves. The weights are distributed over the ranks by tensor, largest
    first; each rank also copies its shard of main parameters and both moments in float32, including padding (``head_only``: the head's).
    """
    groups = ShardGroups.of(parallel)
    weights = [0] * groups.data
    optimizer = experts = 0
    for number, parameters in enumerate(stage_chunks(arch, role, dtype, parallel, stage)):
        shared = [parameter for parameter in parameters if not (groups.experts_apart and parameter.is_expert)]
        for size in sorted((parameter.numel * parameter.item_bytes for parameter in shared), reverse=True):
            heapq.heapreplace(weights, weights[0] + size)
        experts += _num_bytes(parameters) - _num_bytes(shared)
        bucketed = overlap and stage == 0 and number == 0
        for buffer in chunk_buffers(_trained(parameters, head_only), groups, _bucket_size(groups.data) if bucketed else None):
            optimizer += 12 * buffer.numel // groups.size(experts=buffer.experts)
    # many tensors of one size, spread evenly over their expert-data-parallel ranks
    return [share + experts // groups.size(experts=True) + optimizer for share in weights]


def reduction_copy_bytes(
    arch: ModelArchitecture, role: Role, dtype: str, parallel: ParallelConfig, *, stage: int, head_only: bool = False
) -> int:
    """Return the extra memory of gradient reduction on CPU: gloo scatters a copy of each bucket; the largest one counts.

    A group of one rank copies too.
    """
    groups = ShardGroups.of(parallel)
    chunks = (_trained(chunk, head_only) for chunk in stage_chunks(arch, role, dtype, parallel, stage))
    buckets = [bucket for chunk in chunks for buffer in chunk_buffers(chunk, groups, None) for bucket in buffer.buckets]
    return max((end - start for start, end in buckets), default=0) * GRADIENT_BYTES


def num_parameters(arch: ModelArchitecture, role: Role = "policy") -> int:
    """Count the parameters of the whole model without vocabulary padding; tied embeddings count once."""
    layer = sum(parameter.numel for parameter in layer_parameters(arch, 1, 1))
    table = arch.vocab_size * arch.hidden_size
    head = sum(numel for _, numel in _value_head(arch)) if role == "critic" else 0 if arch.tie_word_embeddings else table
    return arch.num_layers * layer + table + arch.hidden_size + head


def mlp_parameters(arch: ModelArchitecture) -> int:
    """Count the active feed-forward parameters of all layers."""
    dense = as_dense(arch)
    return arch.num_layers * 3 * dense.ffn_hidden_size * dense.hidden_size


def num_active_parameters(arch: ModelArchitecture) -> int:
    """Count the active parameters in matrix products: all layers (with experts, the chosen ones) and the head."""
    layers = sum(parameter.numel for parameter in layer_parameters(arch, 1, 1) if not parameter.is_expert)
    if arch.is_moe:
        assert arch.num_experts_per_token is not None and arch.moe_ffn_hidden_size is not None
        layers += arch.num_experts_per_token * 3 * arch.moe_ffn_hidden_size * arch.hidden_size
    return arch.num_layers * layers + arch.vocab_size * arch.hidden_size


def as_dense(arch: ModelArchitecture) -> ModelArchitecture:
    """Convert a mixture of experts to the dense model whose feed-forward layer has the size of a token's chosen experts."""
    if not arch.is_moe:
        return arch
    assert arch.num_experts_per_token is not None and arch.moe_ffn_hidden_size is not None
    return replace(
        arch, num_experts=None, num_experts_per_token=None, ffn_hidden_size=arch.num_experts_per_token * arch.moe_ffn_hidden_size
    )


def offload_host_bytes(
    config: Config,
    architecture: ModelArchitecture,
    critic_architecture: ModelArchitecture | None = None,
    *,
    processes_per_node: int = 1,
    models_move: bool = True,
) -> int:
    """Compute the host memory of offloading on the fullest node (``processes_per_node`` = 1: the fullest rank), in bytes.

    Includes parameters and optimizer state of policy and critic, and a frozen reference's parameters with a KL term, as
    ``megatron.offload.HostPool`` allocates them. CPU optimizers are included independent of ``models_move``, which is whether
    ``model.offload`` is enabled (default: with CUDA).
    """
    states = {
        role: [
            configured_state(config, arch, role, stage=stage, overlap=True)
            for stage in range(config.parallel_of(role).pipeline_model_parallel_size)
        ]
        for role, arch in _models(config, architecture, critic_architecture)
    }
    return fullest_node(host_bytes_by_rank(config, states, models_move=models_move), processes_per_node)


def snapshot_host_bytes(
    config: Config,
    architecture: ModelArchitecture,
    critic_architecture: ModelArchitecture | None = None,
    *,
    processes_per_node: int = 1,
    cuda: bool = False,
) -> int:
    """Compute the host memory of checkpoint copies on the fullest node, in bytes; needed with and without offloading."""
    copies = []
    for role, arch in _models(config, architecture, critic_architecture):
        parallel, frozen = config.parallel_of(role), trains_head_only(config, role)
        by_stage = [
            snapshot_bytes(arch, role, config.model.dtype, parallel, stage=stage, overlap=cuda, head_only=frozen)
            for stage in range(parallel.pipeline_model_parallel_size)
        ]
        copies.append(by_rank(by_stage, parallel))
    return fullest_node([sum(of_rank) for of_rank in zip(*copies, strict=True)], processes_per_node)


def _models(
    config: Config, architecture: ModelArchitecture, critic_architecture: ModelArchitecture | None
) -> list[tuple[Role, ModelArchitecture]]:
    roles: list[tuple[Role, ModelArchitecture]] = [("policy", architecture)]
    if config.uses_critic:
        roles.append(("critic", critic_architecture or new_critic(config, architecture)))
    return roles


def host_bytes_by_rank(config: Config, states: Mapping[Role, Sequence[Sequence[StateBytes]]], *, models_move: bool) -> list[int]:
    """Compute the offloaded bytes of each rank from the states of its models, given by pipeline stage and data-parallel rank."""
    totals = [0] * config.parallel.world_size
    for role, by_stage in states.items():
        copies = 2 if role == "policy" and config.uses_reference else 1
        held = [
            [(copies * state.params + state.optimizer if models_move else 0) + state.host for state in by_data_rank]
            for by_data_rank in by_stage
        ]
        totals = [total + mine for total, mine in zip(totals, by_rank(held, config.parallel_of(role)), strict=True)]
    return totals


def by_rank(by_stage: Iterable[Sequence[int]], parallel: ParallelConfig) -> list[int]:
    """Lay out numbers by pipeline stage and data-parallel rank over all ranks: TP is innermost, pipeline stages outermost."""
    return [value for stage in by_stage for value in stage for _ in range(parallel.tensor_model_parallel_size)]


def fullest_node(ranks: Sequence[int], processes_per_node: int) -> int:
    """Return the largest sum of the ranks' numbers over a node."""
    return max(sum(ranks[begin : begin + processes_per_node]) for begin in range(0, len(ranks), processes_per_node))
