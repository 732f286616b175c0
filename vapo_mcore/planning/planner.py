"""Plan one configuration on one cluster: memory of every rank by stage, whether it fits, changes that make it fit, and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.megatron.offload import Stage
from vapo_mcore.planning.devices import GIB, Device, choose_device
from vapo_mcore.planning.measure import ActivationProbe, ChunkActivations, build_state, pipeline_rank
from vapo_mcore.planning.memory import (
    DiskBytes,
    HostMemory,
    RankModel,
    StageMemory,
    Vllm,
    build_bytes,
    choice_bytes_a_token,
    choices_host_bytes,
    cuda_graph_bytes,
    disk_bytes,
    offload_enabled,
    rank_memory,
    vllm_memory,
    workspace_bytes,
)
from vapo_mcore.planning.state import (
    Role,
    StateBytes,
    configured_state,
    cpu_offload,
    fullest_node,
    host_bytes_by_rank,
    reduction_copy_bytes,
    snapshot_host_bytes,
    trains_head_only,
)
from vapo_mcore.planning.timing import RunEstimate, StepEstimate, StepTimer
from vapo_mcore.planning.workload import Workload, packed_lengths, workload
from vapo_mcore.rollout.factory import engine_traits

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config


@dataclass(frozen=True)
class Cluster:
    """Nodes of ``devices_per_node`` devices; ``processes_per_node`` is lower on a single node that is not filled."""

    nodes: int
    devices_per_node: int
    processes_per_node: int
    device: Device

    @classmethod
    def of(cls, processes: int, devices_per_node: int, device: Device) -> Cluster:
        """Return a cluster with as many nodes as ``processes`` need."""
        per_node = min(devices_per_node, processes)
        return cls(-(-processes // per_node), devices_per_node, per_node, device)


@dataclass(frozen=True)
class Subject:
    """The recipe to plan. ``mean_response_length`` None: an assumed fraction of the maximum."""

    config: Config
    policy: ModelArchitecture
    critic: ModelArchitecture | None
    mean_response_length: int | None = None

    @property
    def roles(self) -> dict[Role, ModelArchitecture]:
        roles: dict[Role, ModelArchitecture] = {"policy": self.policy}
        if self.critic is not None:
            roles["critic"] = self.critic
        return roles

    @property
    def is_moe(self) -> bool:
        return self.policy.is_moe


@dataclass(frozen=True)
class Plan:
    """Result of planning. ``misfits``: sentences, empty if everything fits.

    ``ranks``: the fullest rank of each pipeline stage or, where policy and critic have different layouts, of the ranks with the same
    stages of both, in rank order.
    """

    subject: Subject
    cluster: Cluster
    work: Workload
    ranks: list[dict[Stage, StageMemory]]
    parameters: list[dict[Role, int]]
    capacity: float
    vllm: Vllm
    host: HostMemory
    disk: DiskBytes
    step: StepEstimate
    run: RunEstimate
    misfits: list[str]

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def peak(self) -> float:
        """Memory of the fullest rank in its fullest stage, in bytes."""
        return max(memory.total for rank in self.ranks for memory in rank.values())


class Planner:
    """Plans configurations of one recipe; measures shared activations once."""

    def __init__(self) -> None:
        self.probe = ActivationProbe()

    def plan(self, subject: Subject, cluster: Cluster, *, build: bool) -> Plan:
        """Plan a configuration. ``build``: take state bytes from the real models, else compute them (tested to be equal)."""
        config, device = subject.config, cluster.device
        work = workload(config, subject.mean_response_length)
        vllm = vllm_memory(config, subject.policy, device)
        ranks, parameters, building = [], [], []
        states = self._states(subject, device, build=build)
        by_stage = {
            role: [self._model(subject, role, by_data_rank, work, stage, device) for stage, (by_data_rank, _) in enumerate(of_role)]
            for role, of_role in states.items()
        }
        fullest = {role: max(reversed(models), key=lambda model: model.state.params) for role, models in by_stage.items()}
        stages_of_ranks = _stages_of_ranks(config, subject.roles)
        for stages in stages_of_ranks:
            models = {role: by_stage[role][stage] for role, stage in stages.items()}
            ranks.append(rank_memory(config, models, vllm, work, device))
            building.append(build_bytes(config, models, device))
            parameters.append({role: states[role][stage][1] for role, stage in stages.items()})
        held = {role: [by_data_rank for by_data_rank, _ in of_role] for role, of_role in states.items()}
        offloaded = fullest_node(host_bytes_by_rank(config, held, models_move=offload_enabled(config, device)), cluster.processes_per_node)
        snapshots = snapshot_host_bytes(
            config, subject.policy, subject.critic, processes_per_node=cluster.processes_per_node, cuda=device.is_gpu
        )
        per_process = device.process_host_bytes + cuda_graph_bytes(config, device)
        choices = choices_host_bytes(config, list(subject.roles.values()), work, cluster.processes_per_node)
        host = HostMemory(offloaded, snapshots, per_process * cluster.processes_per_node, choices)
        timer = StepTimer(config, subject.policy, subject.critic, work, device)
        step = timer.estimate(fullest, vllm, cluster.processes_per_node)
        capacity = device.memory if device.is_gpu else (device.node_memory - host.total) / cluster.processes_per_node
        disk = disk_bytes(config, subject.policy, subject.critic)
        places = [_place(config, stages) for stages in stages_of_ranks]
        misfits = list(_misfits(config, ranks, building, places, vllm, host, capacity, cluster))
        return Plan(subject, cluster, work, ranks, parameters, capacity, vllm, host, disk, step, timer.run(step), misfits)

    def _states(self, subject: Subject, device: Device, *, build: bool) -> dict[Role, list[tuple[Sequence[StateBytes], int]]]:
        """Return each model's state by data-parallel rank, and its parameters (0 unless built), by pipeline stage."""
        config = subject.config
        found: dict[Role, list[tuple[Sequence[StateBytes], int]]] = {role: [] for role in subject.roles}
        for role, arch in subject.roles.items():
            layout = config.parallel_of(role)
            for stage in range(layout.pipeline_model_parallel_size):
                if not build:
                    found[role].append((configured_state(config, arch, role, stage=stage, overlap=device.is_gpu), 0))
                    continue
                with pipeline_rank(layout, stage) as parallel:
                    built = build_state(config, role, arch, parallel, on_gpu=device.is_gpu)
                found[role].append((built.by_data_rank, built.parameters))
        return found

    def _model(self, subject: Subject, role: Role, states: Sequence[StateBytes], work: Workload, stage: int, device: Device) -> RankModel:
        config, arch = subject.config, subject.roles[role]
        frozen = trains_head_only(config, role)
        reduction = (
            0
            if device.is_gpu
            else reduction_copy_bytes(arch, role, config.model.dtype, config.parallel_of(role), stage=stage, head_only=frozen)
        )
        largest = max(states, key=lambda state: state.optimizer + state.host)
        chunks = self._chunks(subject, role, work, stage, device)
        head_dim = int(arch.head_dim * arch.rotary_percent)
        choices, workspace = choice_bytes_a_token(config, arch, role), workspace_bytes(config, arch, device)
        return RankModel(largest, chunks, reduction, arch.hidden_size, head_dim, choices, stage, workspace)

    def _chunks(self, subject: Subject, role: Role, work: Workload, stage: int, device: Device) -> tuple[ChunkActivations, ...]:
        config, arch = subject.config, subject.roles[role]
        parallel = config.parallel_of(role)
        pp, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
        return tuple(
            self.probe.chunk(
                config,
                role,
                arch,
                packed_lengths(config, work, role),
                first=stage == 0 and number == 0,
                last=stage == pp - 1 and number == virtual - 1,
                layers=arch.num_layers // (pp * virtual),
                on_gpu=device.is_gpu,
            )
            for number in range(virtual)
        )


def _stages_of_ranks(config: Config, roles: Iterable[Role]) -> list[dict[Role, int]]:
    """Return the pipeline stages of both models on each rank, those that occur, in rank order: pipeline stages are outermost."""
    world = config.parallel.world_size
    layouts = {role: config.parallel_of(role) for role in roles}
    found = [{role: rank * parallel.pipeline_model_parallel_size // world for role, parallel in layouts.items()} for rank in range(world)]
    return [stages for number, stages in enumerate(found) if number == 0 or stages != found[number - 1]]


def _place(config: Config, stages: Mapping[Role, int]) -> str:
    if not config.layouts_differ:
        return f"pipeline stage {stages['policy']}"
    return f"the policy's pipeline stage {stages['policy']} and the critic's {stages['critic']}"


def _misfits(
    config: Config,
    ranks: list[dict[Stage, StageMemory]],
    building: list[float],
    places: list[str],
    vllm: Vllm,
    host: HostMemory,
    capacity: float,
    cluster: Cluster,
) -> Iterator[str]:
    device = cluster.device
    if max(building) > capacity:
        yield (
            f"building the models: {max(building) / GIB:.1f} GiB on a rank of {places[building.index(max(building))]}, "
            f"{capacity / GIB:.1f} GiB are available (weights twice, in modules and in flat buffers, and gradients)"
        )
    for stage in ranks[0]:
        number = max(range(len(ranks)), key=lambda rank: ranks[rank][stage].total)
        memory = ranks[number][stage]
        if memory.total > capacity:
            largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
            named = ", ".join(f"{name} {value / GIB:.1f}" for name, value in largest)
            yield (
                f"{stage}: {memory.total / GIB:.1f} GiB on a rank of {places[number]}, {capacity / GIB:.1f} GiB are available "
                f"(largest: {named})"
            )
    longest = config.max_sequence_length
    if engine_traits(config.rollout.engine).reserves_cache and vllm.kv_bytes < longest * vllm.kv_bytes_per_token:
        held = max(0.0, vllm.kv_bytes) / vllm.kv_bytes_per_token
        yield f"generate: the KV cache holds {held:,.0f} tokens, but the longest sequence has {longest:,}; vLLM would not start"
    if device.is_gpu and host.total > device.node_memory:
        yield (
            f"host: {host.offloaded / GIB:.0f} GiB of offloaded state, {host.snapshots / GIB:.0f} GiB of copies for checkpoints, "
            f"{host.choices / GIB:.0f} GiB of experts' choices and {host.processes / GIB:.0f} GiB of processes on a node, "
            f"{device.node_memory / GIB:.0f} GiB are available"
        )


Reload = Callable[[list[str]], Subject]
"""Function that returns a subject with changed settings, checked by the same rules; raises ConfigError."""


@dataclass(frozen=True)
class Change:
    """One change that makes a plan fit, in command-line syntax."""

    setting: str
    plan: Plan


def single_changes(plan: Plan, planner: Planner, reload: Reload, rates: Sequence[str] = ()) -> Iterator[Change]:
    """Yield the single changes that make everything fit, by GPU-hours. ``rates``: ``KEY=NUMBER`` overrides for any device."""
    found = []
    for settings in candidate_changes(plan.subject, plan.cluster):
        changed = try_plan(planner, reload, plan.cluster, settings)
        if changed is not None and changed.fits:
            found.append(Change(" ".join(settings), changed))
    if plan.cluster.device.name == "h100":
        device = choose_device("h200", rates)
        other = planner.plan(plan.subject, replace(plan.cluster, device=device), build=False)
        if other.fits:
            found.append(Change("--device h200", other))
    yield from sorted(found, key=lambda change: change.plan.run.gpu_hours)


def try_plan(planner: Planner, reload: Reload, cluster: Cluster, settings: list[str]) -> Plan | None:
    """Return the plan with changed settings, None if the rules reject them or the state does not fit on a device."""
    from vapo_mcore.errors import VapoError

    try:
        subject = reload(settings)
    except VapoError:
        return None
    resized = Cluster.of(subject.config.parallel.world_size, cluster.devices_per_node, cluster.device)
    return planner.plan(subject, resized, build=False) if _state_fits(subject, cluster.device) else None


def _state_fits(subject: Subject, device: Device) -> bool:
    """Return whether the state of each model fits on a device; only the layout affects it."""
    config = subject.config
    capacity = device.memory if device.is_gpu else device.node_memory
    for role, arch in subject.roles.items():
        state = configured_state(config, arch, role, stage=0, overlap=device.is_gpu)[0]
        if state.params + state.grads + state.optimizer > capacity:
            return False
    return True


def candidate_changes(subject: Subject, cluster: Cluster) -> Iterator[list[str]]:
    """Yield the settings of each change to try if a plan does not fit."""
    config = subject.config
    p, kinds = config.parallel, ("none", "selective", "full")
    for recompute in kinds[kinds.index(config.model.recompute) + 1 :]:
        yield [f"model.recompute={recompute}"]
    if not offload_enabled(config, cluster.device):
        yield ["model.offload=true"]
    on_device = [role for role in subject.roles if not cpu_offload(config, role)]
    if cluster.device.is_gpu and on_device:
        yield [f"{role}.optimizer.cpu_offload=true" for role in on_device]
    multiples = [config.parallel_of(role).microbatch_multiple for role in subject.roles]
    shortest = max(-(-config.max_sequence_length // multiple) * multiple for multiple in multiples)
    if shortest < config.batch.max_tokens_per_microbatch:
        yield [f"batch.max_tokens_per_microbatch={shortest}"]
    layouts = {"parallel": p} | ({"critic.parallel": config.critic_parallel} if config.layouts_differ else {})
    for section, layout in layouts.items():
        for name in ("tensor", "pipeline", "context"):
            key = f"{name}_model_parallel_size" if name != "context" else "context_parallel_size"
            for factor in (2, 4, 8):
                yield [f"{section}.{key}={getattr(layout, key) * factor}"]
    for factor in (2, 4):
        yield [f"parallel.world_size={p.world_size * factor}"]
    for degree in (2, 4, 8):
        if degree > config.rollout_tensor_parallel_size:
            yield [f"rollout.tensor_parallel_size={degree}"]
    if cluster.device.is_gpu:
        for share in (0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            if share != config.rollout.vllm.gpu_memory_utilization:
                yield [f"rollout.vllm.gpu_memory_utilization={share}"]
