"""Estimate the seconds of each phase of a step, communication volume, and GPU-hours of a recipe from a device's assumed rates.

The model is deliberately simple; docs/planning.md has every formula:

- matrix products: 2 operations per parameter and token forward, 6 in training (8 with full recomputation), plus attention, over all
  ranks, at the assumed fraction of the peak; the pipeline bubble adds (stages - 1) / micro-batches of that;
- CPU optimizer: in every update, gradients to the host and weights back at the device's host rate, and 28 bytes per float32 element that
  AdamW reads and writes;
- communication: bytes divided by the rate of the link, without overlap with computation;
- decoding: each engine step reads the rank's weights and the KV cache of its running sequences once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.planning.devices import Device
from vapo_mcore.planning.memory import RankModel, Vllm, offload_enabled
from vapo_mcore.planning.state import CPU_OPTIMIZER_BYTES, GRADIENT_BYTES, ITEM_BYTES, Role, mlp_parameters, num_active_parameters
from vapo_mcore.planning.waiting import Lengths, Replicas
from vapo_mcore.planning.workload import Workload
from vapo_mcore.rollout.factory import ranks_of_replica

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_ADAMW_BYTES = 28  # per element: reads gradient, main parameter and two moments, writes the last three, in float32
PHASES = ("generate", "values", "critic_update", "logprobs", "policy_update", "weight_sync", "offload")


@dataclass(frozen=True)
class Communication:
    """Bytes that one rank sends in one step, by purpose."""

    tensor_parallel: float
    pipeline: float
    context_parallel: float
    data_parallel: float
    weight_sync: float
    host: float

    @property
    def total(self) -> float:
        return self.tensor_parallel + self.pipeline + self.context_parallel + self.data_parallel + self.weight_sync


@dataclass(frozen=True)
class PassCost:
    """Cost of a pass of a step's tokens through one model, forward only or training.

    ``compute``, ``exchange``: seconds of matrix products and of communication between ranks; the others are bytes that a rank sends.
    """

    compute: float
    exchange: float
    tensor_parallel: float
    pipeline: float
    context_parallel: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exchange


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one RL step, one value-pretraining step and one evaluation, and the bytes that a rank sends in an RL step."""

    phases: dict[str, float]
    pretraining_phases: dict[str, float]
    evaluation: float | None
    communication: Communication

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def pretraining_seconds(self) -> float:
        return sum(self.pretraining_phases.values())


@dataclass(frozen=True)
class RunEstimate:
    """Totals of the whole recipe."""

    steps: int
    updates: int
    pretraining_steps: int
    evaluations: int
    seconds: float
    gpu_hours: float


class StepTimer:
    """Estimates times of one configuration on one type of device."""

    def __init__(self, config: Config, arch: ModelArchitecture, critic: ModelArchitecture | None, work: Workload, device: Device) -> None:
        self.config, self.work, self.device = config, work, device
        self.architectures: dict[Role, ModelArchitecture] = {"policy": arch}
        if critic is not None:
            self.architectures["critic"] = critic
        self.item = ITEM_BYTES[config.model.dtype]
        self.peak = device.flops if self.item == 2 else device.flops_float32

    def estimate(self, models: dict[Role, RankModel], vllm: Vllm, processes_per_node: int) -> StepEstimate:
        config, device = self.config, self.device
        recompute = config.rollout.old_logprobs == "recompute"
        forwards = (1 if recompute else 0) + (1 if config.uses_reference else 0)
        passes: dict[str, PassCost] = {
            "logprobs": self.model_pass("policy", training=False, times=forwards),
            "policy_update": self.model_pass("policy", training=True, times=config.policy.epochs),
        }
        if "critic" in models:
            passes["values"] = self.model_pass("critic", training=False, times=1)
            passes["critic_update"] = self.model_pass("critic", training=True, times=config.critic.epochs)
        data_parallel = {role: self._data_parallel_bytes(role, model) for role, model in models.items()}
        network = device.node_rate if config.parallel.world_size <= processes_per_node else device.network_rate
        phases = {name: entry.seconds for name, entry in passes.items() if entry.seconds}
        for role, num_bytes in data_parallel.items():
            phases[f"{role}_update"] += num_bytes / network
        cpu_copies = {role: self._cpu_optimizer_bytes(role, model) for role, model in models.items()}
        for role, (copied, touched) in cpu_copies.items():
            phases[f"{role}_update"] += copied / device.host_rate + touched / device.host_update_rate
        sync_bytes = self._sync_bytes(models["policy"].state.params)
        phases["weight_sync"] = self.sync_seconds(models["policy"].state.params, vllm)
        host = {role: 2.0 * (model.state.params + model.state.optimizer) for role, model in models.items()}
        if not offload_enabled(config, device):
            host = dict.fromkeys(host, 0.0)
        phases["offload"] = sum(host.values()) / device.host_rate
        phases["generate"] = self.generation_seconds(vllm, self.work.responses, self.work.response_length)
        pretraining: dict[str, float] = {
            name: phases[name] for name in ("generate", "values", "critic_update", "weight_sync") if name in phases
        }
        pretraining["offload"] = host.get("critic", 0.0) / device.host_rate
        evaluation = self._evaluation_prompts()
        return StepEstimate(
            phases={name: phases[name] for name in PHASES if phases.get(name)},
            pretraining_phases={name: pretraining[name] for name in PHASES if pretraining.get(name)},
            evaluation=None if evaluation is None else self.generation_seconds(vllm, evaluation, self.work.response_length),
            communication=Communication(
                tensor_parallel=sum(entry.tensor_parallel for entry in passes.values()),
                pipeline=sum(entry.pipeline for entry in passes.values()),
                context_parallel=sum(entry.context_parallel for entry in passes.values()),
                data_parallel=sum(data_parallel.values()),
                weight_sync=sync_bytes,
                host=sum(host.values()) + sum(copied for copied, _ in cpu_copies.values()),
            ),
        )

    def model_operations(self, role: Role, *, training: bool) -> float:
        """Return the operations of one pass over all tokens of a step, over all ranks, without recomputation."""
        return self.work.tokens * (3 if training else 1) * sum(self._forward_operations(role))

    def _forward_operations(self, role: Role) -> tuple[int, int]:
        """Return the operations that one token takes forward: products with parameters, and attention."""
        arch = self.architectures[role]
        parameters = num_active_parameters(arch) - (arch.vocab_size * arch.hidden_size if role == "critic" else 0)
        # Causal attention: two products of q_dim x length, over half of the positions.
        return 2 * parameters, 2 * arch.num_layers * arch.num_attention_heads * arch.head_dim * self.work.sequence_length

    def model_pass(self, role: Role, *, training: bool, times: int) -> PassCost:
        """Estimate ``times`` passes over all tokens of a step."""
        config, device, work, arch = self.config, self.device, self.work.of(role), self.architectures[role]
        p = config.parallel_of(role)
        tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
        products, attention = self._forward_operations(role)
        once = products + attention
        selective = 2 * mlp_parameters(arch) + (0 if device.is_gpu else attention)  # as megatron.model.recompute_settings
        again = {"none": 0, "selective": selective, "full": once}[config.model.recompute]
        operations = times * work.tokens * (3 * once + again if training else once)
        efficiency = device.train_efficiency if training else device.forward_efficiency
        virtual = p.virtual_pipeline_model_parallel_size or 1
        bubble = 1 + (pp - 1) / (work.microbatches_per_update * virtual if training else work.microbatches_per_update * work.updates)
        compute = operations / p.world_size / (self.peak * efficiency) * bubble
        local = times * work.tokens_per_data_rank / cp  # tokens that go through this rank
        layers = arch.num_layers / pp
        hidden = local * arch.hidden_size * self.item
        # Sequence parallelism: two gathers and two scatters per layer forward, as many backward, and two more gathers for the weight
        # gradients. Without it: two all-reduces each way, each equal to two of these.
        exchanges = 4 + (0 if not training else 6 if p.sequence_parallel else 4)
        exchanges += {"none": 0, "selective": 2, "full": 4}[config.model.recompute] if training else 0
        tensor = exchanges * layers * hidden * (tp - 1) / tp
        pipeline = (2 if training else 1) * hidden / (tp if p.sequence_parallel else 1) * virtual if pp > 1 else 0.0
        kv = 2 * arch.num_key_value_heads * arch.head_dim * self.item / min(tp, arch.num_key_value_heads)
        context = (2 if training else 1) * layers * local * kv * (cp - 1)
        exchange = tensor / device.node_rate + (pipeline + context) / device.network_rate
        return PassCost(compute, exchange, tensor, pipeline, context) if times else PassCost(0.0, 0.0, tensor, pipeline, context)

    def _data_parallel_bytes(self, role: Role, model: RankModel) -> float:
        """Return the bytes of reduce-scattering float32 gradients and all-gathering parameters in all updates of a step."""
        parallel = self.config.parallel_of(role)
        ranks = parallel.data_parallel_size * parallel.context_parallel_size
        epochs = self.config.policy.epochs if role == "policy" else self.config.critic.epochs
        return self.work.updates * epochs * (model.state.grads + model.state.params) * (ranks - 1) / ranks

    def _cpu_optimizer_bytes(self, role: Role, model: RankModel) -> tuple[float, float]:
        """Return for a CPU optimizer, over all updates of a step, the bytes copied to the host and back, and AdamW's memory traffic."""
        epochs = self.config.policy.epochs if role == "policy" else self.config.critic.epochs
        elements = self.work.updates * epochs * model.state.host / CPU_OPTIMIZER_BYTES
        return elements * (GRADIENT_BYTES + self.item), elements * _ADAMW_BYTES

    def sync_seconds(self, params: float, vllm: Vllm) -> float:
        """Estimate a weight sync of a policy with ``params`` bytes on its fullest rank."""
        device = self.device
        return self._sync_bytes(params) / device.node_rate + vllm.weight_bytes / (device.memory_rate * device.memory_efficiency)

    def _sync_bytes(self, params: float) -> float:
        """Return the bytes per rank of broadcasting each stage's shard over the pipeline and gathering all shards over TP."""
        p = self.config.parallel
        tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
        shard = params * pp
        return shard * (1 if pp > 1 else 0) + shard * (tp - 1)

    def generation_seconds(self, vllm: Vllm, responses: int, length: float) -> float:
        """Estimate the time of ``responses`` responses of mean ``length`` over all replicas; at least max_response_length steps."""
        config, work = self.config, self.work
        replicas, token, step_seconds = self._engine(vllm)
        mine = -(-responses // replicas)
        sequence = work.prompt_length + length / 2  # average length while it grows
        running = max(1.0, min(config.rollout.vllm.max_num_seqs, mine, vllm.kv_bytes / (sequence * vllm.kv_bytes_per_token)))
        steps = max(mine * length / running, config.rollout.max_response_length)
        mean_running = mine * length / steps
        return steps * float(step_seconds(mean_running, mean_running * sequence)) + mine * work.prompt_length * token

    def replicas(self, vllm: Vllm, lengths: Lengths, responses: int) -> Replicas:
        """Return the replicas with ``responses`` open responses over all, for ``estimate_waiting``."""
        work, (count, token, step_seconds) = self.work, self._engine(vllm)
        fit = vllm.kv_bytes / ((work.prompt_length + lengths.context) * vllm.kv_bytes_per_token)
        slots = max(1, min(self.config.rollout.vllm.max_num_seqs, int(fit)))
        return Replicas(count, -(-responses // count), slots, work.prompt_length, step_seconds, lambda tokens: tokens * token)

    def _engine(self, vllm: Vllm) -> tuple[int, float, Callable[[Any, Any], Any]]:
        """Return the number of replicas, seconds of a prefilled token, and seconds of an engine step (``Replicas.step_seconds``)."""
        device, arch = self.device, self.architectures["policy"]
        tp = ranks_of_replica(self.config)
        memory = device.memory_rate * device.memory_efficiency
        token = 2 * num_active_parameters(arch) / tp / (self.peak * device.forward_efficiency)
        latency = device.decode_overhead + (2 * arch.num_layers * device.layer_latency if tp > 1 else 0.0)

        def step_seconds(running: Any, cached: Any) -> Any:
            read = vllm.weight_bytes * self._read_share(running) + cached * vllm.kv_bytes_per_token
            return np.maximum(read / memory, running * token) + latency

        return max(1, self.config.parallel.world_size // tp), token, step_seconds

    def _read_share(self, running: Any) -> Any:
        """Return the fraction of the weights that a decoding step reads; with experts, those that its tokens choose."""
        arch = self.architectures["policy"]
        if not arch.is_moe:
            return 1.0
        assert arch.num_experts is not None and arch.num_experts_per_token is not None
        return 1 - (1 - arch.num_experts_per_token / arch.num_experts) ** running

    def _evaluation_prompts(self) -> int | None:
        """Return the number of responses of one evaluation; None if the size of a file is unknown."""
        config = self.config
        if not config.data.eval:
            return None
        sizes = [source.size if source.kind == "reasoning_gym" else config.eval.max_prompts for source in config.data.eval]
        if any(size is None for size in sizes):
            return None
        limit = config.eval.max_prompts
        return sum(min(size, limit or size) for size in sizes if size) * config.eval.samples_per_prompt

    def run(self, step: StepEstimate) -> RunEstimate:
        """Estimate the whole recipe; evaluations of unknown size are not included."""
        config = self.config
        pretraining = config.critic.value_pretraining.max_steps if config.uses_critic else 0
        evaluation = config.eval
        evaluations = 0
        if config.data.eval:
            between = config.run.steps // evaluation.every_steps if evaluation.every_steps else 0
            on_last = bool(evaluation.every_steps) and config.run.steps % evaluation.every_steps == 0
            evaluations = int(evaluation.at_start) + between + int(evaluation.at_end and not on_last)
        seconds = pretraining * step.pretraining_seconds + config.run.steps * step.seconds + evaluations * (step.evaluation or 0.0)
        return RunEstimate(
            steps=config.run.steps,
            updates=config.run.steps * self.work.updates * config.policy.epochs,
            pretraining_steps=pretraining,
            evaluations=evaluations,
            seconds=seconds,
            gpu_hours=seconds * config.parallel.world_size / 3600,
        )
