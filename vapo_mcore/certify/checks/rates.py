"""Rates of this recipe on this machine, compared with plan's: passes of the policy, generation, weight sync, offloading, all-reduce."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from vapo_mcore.certify.batches import policy_batches, policy_loss
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.checks.engine import together
from vapo_mcore.certify.checks.machine import device_name
from vapo_mcore.certify.rates import Assumed, GenerationWork, PassWork, compare_with_plan, number, options
from vapo_mcore.certify.record import Measurement, NotApplicable, fails, informs, not_applicable
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.doctor.network import bus_bandwidth, timed_sum
from vapo_mcore.errors import VapoError
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.planning.devices import DEVICES
from vapo_mcore.planning.workload import packed_lengths, workload
from vapo_mcore.rollout.base import GenerationRequest, SamplingConfig

ROUNDS = 2
LONG_CALL = 2.0
"""Seconds of a first call from which on one more call is timed: warming up is a small part of such a call, and so are fluctuations."""
LONGEST_SECONDS = 2.0
"""Of one pass by plan's assumption; a pass that takes longer is measured with fewer tokens."""
MOST_RESPONSES, MOST_SAMPLED = 32, 64
"""Responses of a replica and tokens of each, to measure generation with."""
GIGA = 1e9


class _Rates:
    """Measures one after another. ``found``: ``--rate`` options of plan; ``known``: whether plan has the device in its table."""

    def __init__(self, bench: Bench) -> None:
        name = device_name()
        self.bench = bench
        self.known = name is not None
        self.gpu = HAS_CUDA
        self.assumed = Assumed(bench.config, bench.architecture, DEVICES[name or "h100"])
        self.found: dict[str, float] = {}

    def compared(self, what: str, value: float, unit: str, assumed: float, *, seconds: bool = False, also: str = "") -> Measurement:
        self.bench.details[what] = value
        return compare_with_plan(what, value, unit, assumed if self.known else None, gpu=self.gpu, seconds=seconds, also=also)

    def measured(self) -> Assumed:
        """Return plan's assumptions, replaced by the measurements so far."""
        return self.assumed.on(**self.found)


def run(bench: Bench) -> list[Measurement]:
    """Measure the links first, so that their time is not counted as that of the matrix products."""
    rates = _Rates(bench)
    found = [*_all_reduce(rates), *_offload(rates), *_passes(rates)]
    try:
        found += _engine(rates)
    except NotApplicable as reason:
        found.append(not_applicable("rollout engine", str(reason)))
    except VapoError as error:
        remedy = "solve what the message says, then certify again"
        found.append(fails("rollout engine", f"could not be measured: {error}", remedy=remedy))
    bench.details["options"] = rates.found
    what = "options for vapo-mcore plan"
    if not rates.found:
        return [*found, not_applicable(what, "no rate of plan's table could be derived")]
    device = f"--device {rates.assumed.device.name} " if rates.known else ""
    return [*found, informs(what, f"{device}{options(rates.found)}")]


def slowest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls after a first one, each timed on the slowest rank. A collective."""

    def timed() -> float:
        all_gather_objects(None)  # the ranks begin together
        _synchronize()
        begin = time.perf_counter()
        run()
        _synchronize()
        return max(all_gather_objects(time.perf_counter() - begin))

    rounds = 1 if timed() > LONG_CALL else ROUNDS
    return min(timed() for _ in range(rounds))


def _synchronize() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------- links and memory


def bandwidths(hosts: Sequence[str], timeout: timedelta) -> dict[str, float]:
    """Bytes a second that a rank sends in an all-reduce: ``node_rate`` among the ranks of a host, of the slowest one; ``network_rate``
    among all, where there are more hosts. ``hosts``: of each rank. A collective."""
    found: dict[str, float] = {}
    names = list(dict.fromkeys(hosts))
    if len(names) > 1:
        found["network_rate"] = bus_bandwidth(len(hosts), timed_sum(timeout)[1])
    members = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    if max(map(len, members.values())) == 1:
        return found
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()} if len(names) > 1 else dict.fromkeys(names, None)
    own = hosts[dist.get_rank()]
    rate = bus_bandwidth(len(members[own]), timed_sum(timeout, groups[own])[1]) if len(members[own]) > 1 else None
    for group in groups.values():
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    found["node_rate"] = min(other for other in all_gather_objects(rate) if other is not None)
    return found


def _all_reduce(rates: _Rates) -> list[Measurement]:
    bench = rates.bench
    backend = "NCCL" if HAS_CUDA else "gloo"
    if bench.parallel.world_size == 1:
        return [not_applicable(f"all-reduce ({backend})", "there is one rank")]
    hosts = all_gather_objects(socket.gethostname())
    found = bandwidths(hosts, timedelta(minutes=bench.config.parallel.timeout_minutes))
    found = {name: min(all_gather_objects(rate)) for name, rate in sorted(found.items())}
    rates.found |= found
    where = {"node_rate": "in a node", "network_rate": "between nodes"}
    device = rates.assumed.device
    return [
        rates.compared(f"all-reduce ({backend}), {where[name]}", rate / GIGA, "GB/s bus bandwidth", getattr(device, name) / GIGA)
        for name, rate in found.items()
    ]


def _offload(rates: _Rates) -> list[Measurement]:
    """Weights and optimizer state of the policy to the device and back, all ranks at once."""
    bench = rates.bench
    residency = bench.models.residency
    if "sync" in bench.__dict__:
        bench.sync.put_to_sleep()

    cycles = 0

    def cycle() -> None:
        nonlocal cycles
        cycles += 1
        residency.enter("policy_update")
        residency.mark_changed("policy")
        residency.enter("generate")

    with bench.models.residency.always_enabled():
        residency.enter("generate")
        cycle()
        before, earlier = residency.traffic.to_device + residency.traffic.to_host, cycles
        seconds = slowest(cycle)
        moved = (residency.traffic.to_device + residency.traffic.to_host - before) / (cycles - earlier)
        ways = _each_way(bench)
    rate = min(all_gather_objects(moved)) / seconds
    what = "offloading"
    if rate <= 0:
        return [not_applicable(what, "the optimizer of the policy is on the CPU and nothing moves")]
    rates.found["host_rate"] = rate
    found = [
        rates.compared(what, rate / GIGA, "GB/s a process", rates.assumed.device.host_rate / GIGA, also=f" ({moved:,.0f} bytes a cycle)")
    ]
    return [*found, *(informs(f"{what}, {way}", f"{number(value)} GB/s a process", value) for way, value in ways.items())]


def _each_way(bench: Bench) -> dict[str, float]:
    """GB/s of a process to the device and to the host, on the slowest rank: the best of some moves."""
    residency = bench.models.residency
    found: dict[str, list[float]] = {"to the device": [], "to the host": []}
    for _ in range(ROUNDS):
        for way, stage, count in (
            ("to the device", "policy_update", lambda: residency.traffic.to_device),
            ("to the host", "generate", lambda: residency.traffic.to_host),
        ):
            if stage == "generate":
                residency.mark_changed("policy")
            all_gather_objects(None)  # the ranks begin together
            _synchronize()
            before, begin = count(), time.perf_counter()
            residency.enter(stage)  # type: ignore[arg-type]
            _synchronize()
            found[way].append((count() - before) / (time.perf_counter() - begin) / GIGA)
    return {way: min(all_gather_objects(max(values))) for way, values in found.items()}


# --------------------------------------------------------------------------------------------------------------------- passes


def pass_work(assumed: Assumed) -> PassWork:
    """Micro-batches as plan packs them; fewer and shorter sequences where a pass would take longer than ``LONGEST_SECONDS``."""
    config = assumed.config
    stages = config.parallel.pipeline_model_parallel_size
    lengths = [length for length in packed_lengths(config, workload(config, None)) if length > 1]
    work = PassWork(tuple(lengths), 2 * stages if stages > 1 else 1)
    while sum(assumed.pass_seconds(work, training=True)) > LONGEST_SECONDS and sum(work.lengths) > 16:
        shorter = work.lengths[: len(work.lengths) // 2] or (max(2, work.lengths[0] // 2),)
        work = replace(work, lengths=shorter)
    return work


def _passes(rates: _Rates) -> list[Measurement]:
    """Log-probs, and forward and backward of the recipe's policy loss."""
    bench = rates.bench
    work = pass_work(rates.assumed)
    sequences = bench.drawn(work.lengths * work.microbatches)
    per = len(work.lengths)
    packs = [list(range(number * per, (number + 1) * per)) for number in range(work.microbatches)]
    microbatches = bench.microbatches(sequences, packs)
    temperature = bench.config.rollout.temperature
    with bench.on_device("logprobs") as models:
        forward = slowest(lambda: models.policy.forward(microbatches, temperature=temperature))
    found = _pass(rates, work, "log-probs", forward, training=False)
    try:
        loss = policy_loss(bench, bench.parallel)
    except NotApplicable as reason:
        return [*found, not_applicable("training", str(reason))]
    with bench.on_device("policy_update") as models:
        batches = policy_batches(models.policy, microbatches, temperature, 0.0)
        training = slowest(lambda: models.policy.accumulate(batches, loss))
        gradients = models.residency.offloaders["policy"].device_bytes()["grads"]
    return [*found, *_pass(rates, work, "training, forward and backward", training, training=True, gradients=gradients)]


def _pass(rates: _Rates, work: PassWork, what: str, seconds: float, *, training: bool, gradients: float = 0.0) -> list[Measurement]:
    parallel = rates.bench.config.parallel
    ranks = parallel.data_parallel_size * parallel.context_parallel_size
    reduced = max(all_gather_objects(gradients)) * (ranks - 1) / ranks
    tokens = work.workload(parallel.data_parallel_size).tokens
    efficiency = rates.measured().efficiency(work, seconds, training=training, reduced_bytes=reduced)
    if rates.known and efficiency is not None:
        rates.found["train_efficiency" if training else "forward_efficiency"] = efficiency
    also = f" ({len(work.lengths)} sequences of at most {max(work.lengths)} tokens a micro-batch)"
    assumed = sum(rates.assumed.pass_seconds(work, training=training, reduced_bytes=reduced))
    found = [rates.compared(what, tokens / seconds, "tokens/s", tokens / assumed, also=also)]
    if rates.gpu:
        share = rates.assumed.utilisation(work, seconds, training=training)
        of = rates.assumed.device.name if rates.known else f"{rates.assumed.device.name}, since plan does not know this device"
        found.append(informs(f"model FLOPs utilisation, {what}", f"{share:.1%} of the dense peak of {of}", share))
    return found


# --------------------------------------------------------------------------------------------------------------------- engine


def _engine(rates: _Rates) -> list[Measurement]:
    return [_sync(rates), _decode(rates)]


def _sync(rates: _Rates) -> Measurement:
    """Without the comparison that other checks make, and without the policy's way off the device, which is offloading."""
    bench = rates.bench
    sync, residency = bench.sync, bench.models.residency
    bench.ready_to_use(bench.engine)
    times = []
    for _ in range(ROUNDS):
        sync.put_to_sleep()
        residency.enter("sync")
        all_gather_objects(None)
        offloading_seconds = [0.0]

        def after_loading(spent: list[float] = offloading_seconds) -> None:
            begin = time.perf_counter()
            residency.enter("generate")
            spent[0] = time.perf_counter() - begin

        begin = time.perf_counter()
        report = sync.make_ready(after_loading, verify=False)
        _synchronize()
        times.append(time.perf_counter() - begin - offloading_seconds[0])
    seconds = min(max(row) for row in zip(*all_gather_objects(times), strict=True))
    own = sum(parameter.numel() * parameter.element_size() for chunk in bench.models.policy.chunks for parameter in chunk.parameters())
    assumed = rates.assumed.sync_seconds(max(all_gather_objects(own)))
    also = f" for {report.names} tensors of {report.bytes:,} bytes"
    return rates.compared("weight sync", seconds, "s", assumed, seconds=True, also=also)


def _decode(rates: _Rates) -> Measurement:
    """Responses to drawn prompts, as many at once as a replica of the recipe would have, at most ``MOST_RESPONSES``."""
    bench = rates.bench
    config, engine = bench.config, bench.engine
    share = max(1, config.batch.responses_per_step // engine.num_replicas)
    count = min(MOST_RESPONSES, config.rollout.vllm.max_num_seqs, share)
    length = max(1, config.data.max_prompt_length // 2)
    prompts = bench.drawn([length] * count)
    how = SamplingConfig(config.rollout.temperature, 1.0, -1, min(MOST_SAMPLED, config.rollout.max_response_length))
    times, works = [], []
    for attempt in range(ROUNDS + 1):
        requests = [GenerationRequest(f"rates {number}", 0, ids, 1000 * attempt + number) for number, ids in enumerate(prompts)]
        all_gather_objects(None)
        begin = time.perf_counter()
        generations = together(lambda requests=requests: engine.generate(requests, how))  # type: ignore[misc]
        seconds = max(all_gather_objects(time.perf_counter() - begin))
        own = [len(generation.token_ids) for generation in generations] if engine.is_replica_leader else []
        lengths = [number for part in all_gather_objects(own) for number in part]
        times.append(seconds)
        works.append(GenerationWork(len(lengths), sum(lengths), max(lengths), length))
        if attempt == 1 and times[0] > LONG_CALL:
            break
    best = max(range(1, len(times)), key=lambda attempt: works[attempt].tokens / times[attempt])
    work, seconds = works[best], times[best]
    if rates.known:
        rates.found |= rates.measured().decode_rates(work, seconds)
    assumed = work.tokens / rates.assumed.generation_seconds(work)
    also = f" ({work.responses} responses of at most {work.longest} tokens, {count} at once in each replica)"
    return rates.compared("generation", work.tokens / seconds, "tokens/s", assumed, also=also)
