"""Memory of every rank in every stage of a step, host memory of a node, and disk space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema.rollout import runs_eagerly
from vapo_mcore.megatron.offload import RESIDENCY, Stage
from vapo_mcore.planning.devices import Device
from vapo_mcore.planning.measure import ChunkActivations, forward_peak, training_peak
from vapo_mcore.planning.state import ITEM_BYTES, Role, StateBytes, num_parameters, refreshes_critic
from vapo_mcore.planning.workload import Workload
from vapo_mcore.rollout.factory import engine_traits, ranks_of_replica
from vapo_mcore.weights.export import DEFAULT_BUCKET_BYTES

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_ROLES: dict[Stage, Role] = {"values": "critic", "critic_update": "critic", "logprobs": "policy", "policy_update": "policy"}
STAGES: tuple[Stage, ...] = ("generate", "values", "critic_update", "logprobs", "policy_update", "sync")
"""The stages in the order of a step."""
VLLM_BLOCK = 16  # tokens of a KV block
_BATCH_BYTES_A_TOKEN = 8 + 2 * 1 + 7 * 4  # ids, two masks, seven float32 columns
_CRITIC_BATCH_BYTES_A_TOKEN = 8 + 2 * 1 + 2 * 4  # of a critic with another layout: ids, two masks, values and returns
# In the micro-batches: ids and mask again, positions in the batch, the layout's five columns of indices and its mask.
_PACKED_BYTES_A_TOKEN = 8 + 1 + 8 + 5 * 8 + 1
# Of Transformer Engine's matrix products on Hopper; grouped products have one workspace a stream.
_WORKSPACE_BYTES, _GROUPED_STREAMS = 32 * 2**20 + 1024, 4
_VLLM_BATCHED_TOKENS = {True: 16384, False: 8192}  # vLLM's default tokens per engine step, on a large GPU and on CPU


@dataclass(frozen=True)
class RankModel:
    """One model on one pipeline rank: its state on the fullest data-parallel rank, and the activations of each chunk.

    ``reduction``: bytes of the gradient reduction, when all activations are freed. ``hidden_size``, ``head_dim``: those of the model.
    ``choice_bytes_a_token``: of the experts that router replay repeats. ``stage``: the rank's pipeline stage in the model's layout.
    ``workspace``: bytes that the library of its layers keeps for matrix products, shared with the other model.
    """

    state: StateBytes
    chunks: tuple[ChunkActivations, ...]
    reduction: int = 0
    hidden_size: int = 0
    head_dim: int = 0
    choice_bytes_a_token: int = 0
    stage: int = 0
    workspace: int = 0


@dataclass
class StageMemory:
    """Memory of one rank in one stage, by purpose, in bytes."""

    parts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, num_bytes: float) -> None:
        if num_bytes:
            self.parts[name] = self.parts.get(name, 0.0) + num_bytes

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Vllm:
    """Memory of a rollout replica on one rank."""

    weight_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    workspace_bytes: float

    @property
    def kv_tokens(self) -> int:
        return int(self.kv_bytes // self.kv_bytes_per_token) // VLLM_BLOCK * VLLM_BLOCK


def vllm_memory(config: Config, arch: ModelArchitecture, device: Device) -> Vllm:
    """Compute vLLM's memory on one rank by its rules; on GPUs the rest of ``gpu_memory_utilization`` becomes KV cache."""
    traits, tp, item = engine_traits(config.rollout.engine), ranks_of_replica(config), ITEM_BYTES[config.model.dtype]
    weights = _vllm_parameters(arch, tp) * item
    per_token = 2 * arch.num_layers * max(1.0, arch.num_key_value_heads / tp) * arch.head_dim * item
    settings = config.rollout.vllm
    if not traits.reserves_cache:  # the cache grows with the number of running sequences
        return Vllm(num_parameters(arch) * item / tp, settings.max_num_seqs * config.max_sequence_length * per_token, per_token, 0.0)
    tokens = settings.max_num_batched_tokens or _VLLM_BATCHED_TOKENS[device.is_gpu]
    ffn = arch.ffn_hidden_size if not arch.is_moe else (arch.num_experts_per_token or 1) * (arch.moe_ffn_hidden_size or 0)
    workspace = tokens * (4 * arch.hidden_size + 3 * ffn / tp) * item + settings.max_num_seqs * arch.vocab_size * 4 * 3
    if settings.num_gpu_blocks is not None:
        kv = settings.num_gpu_blocks * VLLM_BLOCK * per_token
    elif device.is_gpu:
        graphs = cuda_graph_bytes(config, device)  # vLLM measures them and reserves memory for them
        kv = settings.gpu_memory_utilization * device.memory - weights - workspace - graphs - _residual(config, device)
    else:
        kv = settings.kv_cache_gib * 2**30
    return Vllm(weights, kv, per_token, workspace)


def cuda_graph_bytes(config: Config, device: Device) -> float:
    """Return the bytes of vLLM's CUDA graphs: on the device together with vLLM's weights, in page-locked host memory while it sleeps."""
    if not engine_traits(config.rollout.engine).captures_graphs or runs_eagerly(config.rollout.vllm, cuda=device.is_gpu):
        return 0.0
    return device.cuda_graph_bytes


def _vllm_parameters(arch: ModelArchitecture, tp: int) -> float:
    """Return the elements of vLLM's shard: q heads, MLP and vocabulary split over TP, and key-value heads if there are enough."""
    hidden, head = arch.hidden_size, arch.head_dim
    q, kv = arch.num_attention_heads * head / tp, max(1.0, arch.num_key_value_heads / tp) * head
    layer = hidden * (2 * q + 2 * kv) + 2 * hidden + (q + 2 * kv if arch.qkv_bias else 0) + (2 * head if arch.qk_norm else 0)
    if arch.is_moe:
        assert arch.num_experts is not None and arch.moe_ffn_hidden_size is not None
        layer += arch.num_experts * (hidden + 3 * hidden * arch.moe_ffn_hidden_size / tp)
    else:
        layer += 3 * hidden * arch.ffn_hidden_size / tp
    vocabulary = -(-arch.vocab_size // 64) * 64 / tp
    return arch.num_layers * layer + (1 if arch.tie_word_embeddings else 2) * vocabulary * hidden + hidden


def _residual(config: Config, device: Device) -> float:
    """Return the device memory of CUDA, its libraries and the communicators: the world's and, if > 1, TP, CP, PP, DP of each layout and
    the rollout's TP."""
    layouts = [config.parallel, *([config.critic_parallel] if config.layouts_differ else [])]
    degrees = [config.parallel.world_size, config.rollout_tensor_parallel_size]
    for p in layouts:
        degrees += [p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size]
    return device.context_bytes + device.nccl_bytes * sum(degree > 1 for degree in degrees)


def offload_enabled(config: Config, device: Device) -> bool:
    """Return whether models are offloaded between their stages (``model.offload``; default: on GPUs)."""
    return device.is_gpu if config.model.offload is None else config.model.offload


def rank_memory(config: Config, models: dict[Role, RankModel], vllm: Vllm, workload: Workload, device: Device) -> dict[Stage, StageMemory]:
    """Compute the device memory of the rank with these models, for every stage of a step."""
    return {stage: _stage_memory(config, models, vllm, workload, device, stage) for stage in STAGES}


def build_bytes(config: Config, models: dict[Role, RankModel], device: Device) -> float:
    """Compute the peak memory of a rank while its models are built one after the other.

    The weights of the model being built exist twice, in the modules and in the flat buffers they move into, next to the gradients; frozen
    weights exist once. A critic rebuilt between value pretraining and RL copies its weights from the old one, which exists until then.
    """
    most = before = _residual(config, device)
    for role, model in models.items():
        built = 2 * model.state.params - model.state.frozen + model.state.grads
        most = max(most, before + built)
        if role == "critic" and refreshes_critic(config):
            most = max(most, before + built + model.state.params)
        if not offload_enabled(config, device):
            before += model.state.params + model.state.grads + model.state.optimizer
    return most


def _stage_memory(
    config: Config, models: dict[Role, RankModel], vllm: Vllm, workload: Workload, device: Device, stage: Stage
) -> StageMemory:
    memory = StageMemory()
    memory.add("CUDA, NCCL", _residual(config, device))
    for role, model in models.items():
        parts = RESIDENCY[stage].get(role, frozenset()) if offload_enabled(config, device) else ("params", "grads", "optimizer")
        memory.add(f"{role} weights", model.state.params if "params" in parts else 0)
        memory.add(f"{role} gradients", model.state.grads if "grads" in parts else 0)
        memory.add(f"{role} optimizer", model.state.optimizer if "optimizer" in parts else 0)
    _add_activations(memory, config, models, workload, device, stage)
    memory.add("rotary tables", _rotary_bytes(config, models))
    memory.add("matrix product workspaces", max((model.workspace for model in models.values()), default=0))
    if stage in ("generate", "sync") and not offload_enabled(config, device):
        memory.add("gather buffer", _gather_bytes(config, models))
    _add_choices(memory, config, models, workload, stage)
    if stage not in ("generate", "sync"):
        memory.add("rollout batch", workload.tokens_per_data_rank * (_BATCH_BYTES_A_TOKEN + _PACKED_BYTES_A_TOKEN))
        if workload.critic is not None:
            memory.add("rollout batch", workload.critic.tokens_per_data_rank * (_CRITIC_BATCH_BYTES_A_TOKEN + _PACKED_BYTES_A_TOKEN))
    sleeps = device.is_gpu and engine_traits(config.rollout.engine).sleeps  # vLLM's CPU backend cannot free its memory
    if stage in ("generate", "sync") or not sleeps:
        memory.add("vLLM weights", vllm.weight_bytes)
        memory.add("CUDA graphs", cuda_graph_bytes(config, device))
    if stage == "sync":
        memory.add("sync bucket", DEFAULT_BUCKET_BYTES)
    if stage == "generate" or not sleeps:
        memory.add("KV cache", max(0.0, vllm.kv_bytes))
        memory.add("vLLM workspace", vllm.workspace_bytes)
    return memory


def choice_bytes_a_token(config: Config, arch: ModelArchitecture, role: Role = "policy") -> int:
    """Return the bytes per token in which router replay keeps the experts of one pipeline rank's layers; 0 without it."""
    if config.model.router.replay == "off" or not arch.is_moe:
        return 0
    assert arch.expert_choices is not None
    return arch.expert_choices.bytes_a_token // config.parallel_of(role).pipeline_model_parallel_size


def choices_host_bytes(config: Config, archs: Sequence[ModelArchitecture], workload: Workload, processes: int) -> float:
    """Return the most host memory of the choices on a node: each rank keeps those of its data-parallel rank's tokens.

    Those of the critic are freed before the policy's are recorded, except if a KL penalty in the reward needs the policy's first. While
    a model's are stored, those of its micro-batches are there as well. With ``replay: engine`` each rank has the engine's choices too until
    the policy's pass, and the ranks that sampled them keep all layers' for a dump. ``archs``: the policy's first.
    """
    roles: tuple[Role, ...] = ("policy", "critic")
    sizes = [
        workload.of(role).tokens_per_data_rank * choice_bytes_a_token(config, arch, role)
        for role, arch in zip(roles, archs, strict=False)  # without a critic the policy's alone
    ]
    kept = sum(sizes) if config.algorithm.kl.place == "reward" else max(sizes)
    stored = processes * (kept + max(sizes))
    shape = archs[0].expert_choices
    if config.model.router.replay != "engine" or shape is None:
        return stored
    sampled = workload.tokens * shape.bytes_a_token * processes / config.parallel.world_size
    return stored + processes * sizes[0] + sampled


def _add_choices(memory: StageMemory, config: Config, models: dict[Role, RankModel], workload: Workload, stage: Stage) -> None:
    """Add the choices of experts on the device: of the whole pass that records them, or of the mini-batch that replays them.

    With ``replay: engine`` the policy's pass also has the engine's choices of all its micro-batches.
    """
    role = _ROLES.get(stage)
    if role not in models:
        return
    parallel, workload = config.parallel_of(role), workload.of(role)
    if stage in ("values", "logprobs"):  # each rank's own tokens, gathered after the pass
        tokens = workload.tokens_per_data_rank / (parallel.tensor_model_parallel_size * parallel.context_parallel_size)
        tokens += workload.tokens_per_data_rank if stage == "logprobs" and config.model.router.replay == "engine" else 0
    else:
        tokens = workload.tokens_per_data_rank / workload.updates
    memory.add("expert choices", tokens * models[role].choice_bytes_a_token)


def workspace_bytes(config: Config, arch: ModelArchitecture, device: Device) -> int:
    """Return the bytes of Transformer Engine's workspaces, which it keeps as long as the process lives; 0 with other layers.

    ``model.attention: auto`` takes Transformer Engine on GPUs in bfloat16, if it is installed there.
    """
    attention = config.model.attention
    if not device.is_gpu or not (attention == "te" or (attention == "auto" and config.model.dtype == "bfloat16")):
        return 0
    return _WORKSPACE_BYTES * (1 + _GROUPED_STREAMS * arch.is_moe)


def _rotary_bytes(config: Config, models: dict[Role, RankModel]) -> float:
    """Return the bytes of the chunks' rotary tables (``megatron.rope.RotaryTable``, float32, maximum length), present in every stage."""
    return sum(len(model.chunks) * config.max_sequence_length * model.head_dim * 4 for model in models.values())


def _gather_bytes(config: Config, models: dict[Role, RankModel]) -> float:
    """Return the bytes of the buffer that Megatron keeps for gathers of sequence parallelism.

    It is part of the activations while a model runs; entering a stage with ``model.offload`` frees it.
    """

    def widths() -> Iterator[float]:
        for role, model in models.items():
            parallel = config.parallel_of(role)
            yield model.hidden_size / parallel.context_parallel_size if parallel.sequence_parallel else 0.0

    return config.batch.max_tokens_per_microbatch * max(widths()) * ITEM_BYTES[config.model.dtype]


def _add_activations(
    memory: StageMemory, config: Config, models: dict[Role, RankModel], workload: Workload, device: Device, stage: Stage
) -> None:
    role = _ROLES.get(stage)
    if role not in models:
        return
    chunks = models[role].chunks
    if stage in ("values", "logprobs"):
        total, running = forward_peak(chunks)
    else:
        stages = config.parallel_of(role).pipeline_model_parallel_size
        total, running = training_peak(chunks, models[role].stage, stages, workload.of(role).microbatches_per_update)
        total = max(total, models[role].reduction)
    memory.add("logits", running.logits)
    memory.add("activations", (total - running.logits) * (1 + device.slack))


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the fullest node: offloaded state, copies that checkpoints are written from, processes, choices of experts."""

    offloaded: float
    snapshots: float
    processes: float
    choices: float = 0.0

    @property
    def total(self) -> float:
        return self.offloaded + self.snapshots + self.processes + self.choices


@dataclass(frozen=True)
class DiskBytes:
    """Disk space of one export of the policy, one saved critic, and one checkpoint (weights and optimizers of both models)."""

    export: float
    critic: float
    checkpoint: float


def disk_bytes(config: Config, policy: ModelArchitecture, critic: ModelArchitecture | None) -> DiskBytes:
    item = ITEM_BYTES[config.model.dtype]
    count = num_parameters(policy)
    critic_count = 0 if critic is None else num_parameters(critic, "critic")
    per_parameter = item + 12  # main parameters and both moments in float32, even if the weights are float32
    return DiskBytes(count * item, critic_count * item, (count + critic_count) * per_parameter)
