"""Run checks of ``vapo-mcore certify`` that are meaningful only on a GPU: ``--checks benchmarks/gpu_checks.py:memory`` and so on.

``memory``: peaks of torch's allocator in every stage of a step, and what the engine takes, beside what ``plan`` predicts.
``sleep``: seconds in which the engine sleeps and wakes up, and what it leaves on the device. ``logprob_memory``: what the log-prob function
needs besides the logits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vapo_mcore.certify.batches import critic_batches, policy_batches, policy_loss
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.checks.machine import device_name, planned
from vapo_mcore.certify.checks.rates import pass_work
from vapo_mcore.certify.rates import Assumed
from vapo_mcore.certify.record import Measurement, NotApplicable, fails, holds, informs, warns
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.logprob import vocab_parallel_logprobs
from vapo_mcore.megatron.losses import CriticLoss
from vapo_mcore.planning.devices import DEVICES
from vapo_mcore.rollout.factory import engine_traits

STAND_IN = "h100"
"""Device that plan assumes if it does not know this one."""
LOWEST, HIGHEST = 0.95, 1.25
"""Bounds of predicted over measured bytes: plan may predict more than is needed, for fragmentation; too little would end a run."""
ROUNDS = 3
LEFT_BYTES = 64 * 2**20
"""Device memory that may be in use after a later round of sleep in addition to that after the first."""
ENGINE_PARTS = ("vLLM weights", "CUDA graphs", "KV cache", "vLLM workspace")
NOT_OF_A_STAGE = (*ENGINE_PARTS, "CUDA, NCCL", "rotary tables")
"""Parts of plan's that are on the device in other stages, too, or that torch's allocator does not see."""


def _require_cuda() -> None:
    if not HAS_CUDA:
        raise NotApplicable("there is no CUDA device, whose allocator could be asked")


# ---------------------------------------------------------------------------------------------------------------------- memory


def memory(bench: Bench) -> list[Measurement]:
    """Compare each stage's peak, above what is on the device between stages, with plan's prediction for the same micro-batches."""
    _require_cuda()
    if bench.parallel.world_size != 1:
        raise NotApplicable("it is measured in one process")
    _, plan = planned(bench, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device_name() or STAND_IN)
    stages = plan["pipeline_ranks"][0]["stages"]
    predicted = {stage: {name: float(size) for name, size in facts["parts"].items()} for stage, facts in stages.items()}
    found = []
    if device_name() is None:
        shown = f"{STAND_IN}, since plan does not know {torch.cuda.get_device_name()}; what the engine takes depends on the device's memory"
        found.append(informs("plan's device", shown))
    with bench.models.residency.always_enabled():
        bench.models.residency.enter("generate")
        for stage, run in _passes(bench).items():
            found.append(_beside(bench, stage, _peak(bench, stage, run), _of_the_stage(predicted[stage])))
    found.append(_engine(bench, predicted["generate"]))
    return found


def _of_the_stage(parts: Mapping[str, float]) -> float:
    return sum(size for name, size in parts.items() if name not in NOT_OF_A_STAGE)


def _passes(bench: Bench) -> dict[Any, Callable[[], object]]:
    """Return for each stage the function that a step runs in it, on two micro-batches packed like plan's."""
    assumed = Assumed(bench.config, bench.architecture, DEVICES[device_name() or STAND_IN])
    lengths = list(pass_work(assumed).lengths)
    packs = [list(range(len(lengths))), list(range(len(lengths), 2 * len(lengths)))]
    microbatches = bench.microbatches(bench.drawn(lengths * 2), packs)
    models, temperature = bench.models, bench.config.rollout.temperature
    policy, critic = models.policy, models.critic
    loss = policy_loss(bench, bench.parallel)
    with bench.on_device("logprobs"):
        policy_inputs = policy_batches(policy, microbatches, temperature, 0.0)
    passes: dict[Any, Callable[[], object]] = {}
    if critic is not None:
        critic_inputs = critic_batches(critic, microbatches)
        critic_loss = CriticLoss(None, critic.architecture.value_bins)
        passes["values"] = lambda: critic.forward(microbatches, outputs=("values",))
        passes["critic_update"] = lambda: critic.train_step(critic_inputs, critic_loss, unscheduled_lr=0.0)
    passes["logprobs"] = lambda: policy.forward(microbatches, temperature=temperature)
    passes["policy_update"] = lambda: policy.train_step(policy_inputs, loss, unscheduled_lr=0.0)
    return passes


def _peak(bench: Bench, stage: Any, run: Callable[[], object]) -> int:
    """Return the peak bytes of a second run of a stage, when moments exist and kernels are compiled."""
    residency, peaks = bench.models.residency, []
    for _ in range(2):
        residency.enter("generate")
        torch.cuda.empty_cache()
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        residency.enter(stage)
        result = run()
        del result
        peaks.append(torch.cuda.max_memory_allocated() - rest)
        if stage.endswith("update"):
            residency.mark_changed(stage.removesuffix("_update"))
    residency.enter("generate")
    return peaks[-1]


def _beside(bench: Bench, stage: str, measured: float, predicted: float) -> Measurement:
    ratio = predicted / measured
    bench.details[stage] = {"measured": measured, "predicted": predicted}
    shown = f"{measured / 2**20:,.1f} MiB, plan predicts {predicted / 2**20:,.1f} MiB ({ratio:.2f} times as much)"
    what, tolerance = f"peak of {stage}", f"plan predicts {LOWEST} to {HIGHEST} times the measured peak"
    if LOWEST <= ratio <= HIGHEST:
        return holds(what, shown, tolerance, measured)
    remedy = "leave room accordingly (rollout.vllm.gpu_memory_utilization, batch.max_tokens_per_microbatch), and report both numbers"
    found = warns(what, shown, tolerance, remedy)
    return Measurement(found.what, found.verdict, found.measured, found.tolerance, found.remedy, measured)


def _used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _engine(bench: Bench, predicted: Mapping[str, float]) -> Measurement:
    """Measure the device memory that the engine takes when it is ready, compared with when it sleeps."""
    bench.sync.put_to_sleep()
    bench.models.residency.enter("generate")
    asleep = _used()
    bench.sync_weights()
    awake = _used() - asleep
    bench.sync.put_to_sleep()
    parts = {name: predicted.get(name, 0.0) for name in ENGINE_PARTS}
    bench.details["generate"] = {"measured": awake, "predicted": parts}
    if engine_traits(bench.config.rollout.engine).reserves_cache:
        return _beside(bench, "generate, of the engine", awake, sum(parts.values()))
    shown = f"{awake / 2**20:,.1f} MiB; plan predicts {parts['vLLM weights'] / 2**20:,.1f} MiB of weights"
    return informs("peak of generate, of the engine", f"{shown}, and its cache grows while it generates", float(awake))


# ---------------------------------------------------------------------------------------------------------------------- engine


def sleep(bench: Bench) -> list[Measurement]:
    """Let the engine sleep and wake up several times, with a weight sync in between."""
    engine, sync, residency = bench.ready_to_use(bench.engine), bench.sync, bench.models.residency
    seconds: dict[str, list[float]] = {"sleep": [], "wake up for weights": [], "wake up for the KV cache": []}
    left = []
    bench.sync_weights()
    for _ in range(ROUNDS):
        seconds["sleep"].append(_timed(engine.sleep))
        left.append(_used() if HAS_CUDA else 0)
        residency.enter("sync")
        seconds["wake up for weights"].append(_timed(engine.wake_weights))
        engine.update_weights(sync.exporter.buckets(), sync.exporter.names)
        residency.enter("generate")
        seconds["wake up for the KV cache"].append(_timed(engine.wake_kv_cache))
    sync.put_to_sleep()
    bench.details["seconds"] = seconds
    found = [informs(what, f"{min(values):.3g} s", min(values)) for what, values in seconds.items()]
    if not HAS_CUDA:
        return found
    growth = max(left) - left[0]
    what, tolerance = "device memory after sleep", f"at most {LEFT_BYTES / 2**20:.0f} MiB more than after the first round"
    shown = f"{left[0] / 2**20:,.0f} MiB of the device are in use, {growth / 2**20:,.1f} MiB more after {ROUNDS} rounds"
    remedy = "the engine keeps memory at every sync: restart the run from time to time, and report it"
    return [*found, holds(what, shown, tolerance, left[0]) if growth <= LEFT_BYTES else fails(what, shown, tolerance, remedy, left[0])]


def _timed(run: Callable[[], object]) -> float:
    if HAS_CUDA:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if HAS_CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# --------------------------------------------------------------------------------------------------------------------- log-probs


def logprob_memory(bench: Bench) -> Measurement:
    """Measure peak bytes of log-probs and entropies over the logits', for half a micro-batch and 1/8 of the vocabulary."""
    _require_cuda()
    tokens = bench.config.batch.max_tokens_per_microbatch // 2
    vocab = max(64, bench.architecture.vocab_size // 8)
    device = bench.parallel.device
    logits = torch.randn(tokens, vocab, device=device).to(bench.torch_dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropies = vocab_parallel_logprobs(logits, labels, vocab_size=vocab, entropy=True)
    assert entropies is not None
    (logprobs.sum() + entropies.sum()).backward()
    extra = (torch.cuda.max_memory_allocated() - before) / (logits.numel() * logits.element_size())
    what, shown = "log-probs and entropies, forward and backward", f"{extra:.2f} times the bytes of the logits, {tokens} x {vocab}"
    bench.details["extra_over_logits"] = extra
    return informs(what, shown, extra)
