"""Record the metrics of a step other than losses: responses, packing, rollout/trainer mismatch, values, time and memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.importance import measure_mismatch
from vapo_mcore.algorithm.losses import explained_variance
from vapo_mcore.algorithm.profiles import LENGTH_BINS, length_bins, value_profiles
from vapo_mcore.config.verifiers import UNGRADED
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.megatron.routing import RouterCoefs, RoutingStatistics
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.records.timing import PhaseTimer


def record_rows(metrics: StepMetrics, rows: Rows, trained_lengths: Tensor, counts: SamplingCounts, max_length: int) -> None:
    """Record response metrics from the replicated rows.

    ``trained_lengths``: int64 [n], tokens that carry a loss; ``max_length``: upper end of the length histogram.
    """
    graded = rows.graded
    rewards, scores, verdicts = rows.reward[graded].double(), rows.score[graded].double(), rows.verdict[graded].double()
    some = bool(graded.any())
    metrics.put("reward/mean", float(rewards.mean()) if some else None)
    metrics.put("reward/std", float(rewards.std(correction=0)) if some else None)
    metrics.put("reward/raw_mean", float(scores.mean()) if some else None)
    metrics.put("reward/steps_mean", float(rows.step_reward[graded].double().mean()) if some else None)
    counts_of_steps = [len(steps) for steps, known in zip(rows.step_rewards, graded.tolist(), strict=True) if known]
    metrics.put("reward/steps_per_response", sum(counts_of_steps) / len(counts_of_steps) if some else None)
    metrics.put("accuracy/mean", float(verdicts.mean()) if some else None)
    _record_groups(metrics, rows)
    lengths, count = rows.response_length.double(), len(rows)
    metrics.put("response/count", count)
    metrics.put("response/length_mean", float(lengths.mean()) if count else None)
    metrics.put("response/length_max", int(lengths.max()) if count else None)
    metrics.put("response/length_min", int(lengths.min()) if count else None)
    metrics.put("response/length_histogram", torch.bincount(length_bins(rows.response_length, max_length), minlength=LENGTH_BINS).tolist())
    metrics.put("response/truncated_frac", float(rows.truncated.double().mean()) if count else None)
    metrics.put("response/missed_end", int(rows.missed_end.sum()))
    metrics.put("grading/failed", count - int(graded.sum()))
    for cause in UNGRADED:
        metrics.put(f"grading/failed_{cause}", rows.ungraded.count(cause))
    metrics.put("turns/mean", float(rows.turns.double().mean()) if count else None)
    metrics.put("turns/limit_frac", rows.finish_reason.count("turns") / count if count else None)
    metrics.put("turns/observations_cut", int(rows.observations_cut.sum()))
    metrics.put("tokens/response", int(rows.response_length.sum()))
    metrics.put("tokens/tool", int(rows.tool_length.sum()))
    metrics.put("tokens/total", int(rows.length.sum()))
    metrics.put("tokens/trained", int(trained_lengths.sum()))
    metrics.put("sampling/rounds", counts.rounds)
    metrics.put("sampling/prompts_tried", counts.prompts_tried)
    metrics.put("sampling/responses", counts.responses)
    metrics.put("sampling/tokens", counts.tokens)
    metrics.put("generate/idle_frac", counts.idle_frac)
    metrics.put("generate/empty_frac", counts.empty_frac)
    metrics.put("sampling/accuracy", counts.correct / counts.graded if counts.graded else None)
    metrics.put("sampling/dropped_all_right", counts.dropped_all_right)
    metrics.put("sampling/dropped_all_wrong", counts.dropped_all_wrong)
    metrics.put("sampling/dropped_ungraded", counts.dropped_ungraded)
    metrics.put("sampling/dropped_surplus", counts.dropped_surplus)


def record_sources(metrics: StepMetrics, rows: Rows, sources: Sequence[str]) -> None:
    """Record response metrics separately for each training source, if there are several."""
    if len(sources) < 2:
        return
    for name in sources:
        mine = torch.tensor([source == name for source in rows.source], dtype=torch.bool)
        graded = mine & rows.graded
        some = bool(graded.any())
        metrics.put(f"source/{name}/responses", int(mine.sum()))
        metrics.put(f"source/{name}/reward", float(rows.reward[graded].double().mean()) if some else None)
        metrics.put(f"source/{name}/accuracy", float(rows.verdict[graded].double().mean()) if some else None)
        metrics.put(f"source/{name}/length_mean", float(rows.response_length[mine].double().mean()) if bool(mine.any()) else None)


def _record_groups(metrics: StepMetrics, rows: Rows) -> None:
    groups = int(rows.group.max()) + 1 if len(rows) else 0
    zeros = torch.zeros(groups, dtype=torch.int64)
    graded = zeros.index_add(0, rows.group, rows.graded.long())
    right = zeros.index_add(0, rows.group, (rows.graded & rows.verdict).long())
    known = graded > 0
    shares = {
        "mixed": (right > 0) & (right < graded),
        "all_right": known & (right == graded),
        "all_wrong": known & (right == 0),
    }
    for name, chosen in shares.items():
        metrics.put(f"groups/{name}_frac", int(chosen.sum()) / groups if groups else None)
    between = 1 + 10 * right[known] // graded[known]  # integer arithmetic: rounding cannot move a share into a neighbouring bin
    bins = torch.where(shares["all_wrong"][known], 0, torch.where(shares["all_right"][known], 11, between))
    metrics.put("groups/accuracy_histogram", torch.bincount(bins, minlength=12).tolist())


def record_packing(metrics: StepMetrics, experience: Experience, owner: Tensor, ranks: int, max_tokens: int) -> None:
    """Record how full the micro-batches are and how balanced the data-parallel ranks are, from the replicated plan."""
    packs = sum(len(minibatch.microbatches) for minibatch in experience.minibatches)
    scheduled = owner >= 0
    tokens = torch.zeros(ranks, dtype=torch.int64).index_add(0, owner[scheduled], experience.rows.length[scheduled])
    total = int(tokens.sum())
    metrics.put("packing/microbatches", packs)
    metrics.put("packing/fill", total / (packs * ranks * max_tokens) if packs else None)
    metrics.put("packing/imbalance", int(tokens.max()) * ranks / total if total else None)


def record_mismatch(metrics: StepMetrics, experience: Experience, cap: float, group: dist.ProcessGroup, *, horizon: bool = False) -> None:
    """Compare the trainer's log-probs (from the log-prob pass) with the rollout's. Collective over data parallelism.

    Tokens that an older policy sampled are left out: their difference is the policy's change, not a mismatch of the engines. It is
    recorded for all tokens as ``mismatch/off_policy_*`` with a horizon.
    """
    batch = experience.batch
    read = (batch["old_logprobs"], batch["rollout_logprobs"])
    found = measure_mismatch(*read, experience.sampled_now(), cap=cap, group=group)
    for name, value in found.items():
        metrics.put(f"mismatch/{name}", value)
    if horizon:
        found = measure_mismatch(*read, experience.mask, cap=cap, group=group)
        for name in ("kl", "ess", "beyond_cap_frac"):
            metrics.put(f"mismatch/off_policy_{name}", found[name])


def record_values(
    metrics: StepMetrics,
    experience: Experience,
    monte_carlo: Tensor,
    max_length: int,
    group: dist.ProcessGroup,
    reward_range: tuple[float, float],
) -> None:
    """Record values from before the critic's update against its targets and the Monte-Carlo returns. Collective over data parallelism."""
    values, returns, mask = experience.batch["values"], experience.batch["returns"], experience.mask
    metrics.put("critic/explained_variance", explained_variance(values, returns, mask, group))
    metrics.put("critic/explained_variance_mc", explained_variance(values, monte_carlo, mask, group))
    for name in ("mean", "min", "max"):
        metrics.add_tokens(f"critic/values_{name}", values, mask)
    for name in ("mean", "std"):
        metrics.add_tokens(f"critic/returns_{name}", returns, mask)
    for name, profile in value_profiles(values, returns, mask, experience.cu_seqlens, max_length, group, monte_carlo, reward_range).items():
        metrics.put(f"critic/{name}", profile)


def record_routing(metrics: StepMetrics, role: str, found: RoutingStatistics, coefs: RouterCoefs, updates: int, *, replayed: bool) -> None:
    """Record the load of a mixture's experts, and the losses of its routers, in the updates of a step."""
    if not found.tokens:
        return
    layers, experts = found.load.shape
    busiest = (found.load / found.tokens).amax(1)
    shares = found.load / found.load.sum(1, keepdim=True)
    entropy = -torch.xlogy(shares, shares).sum(1) / math.log(experts)
    metrics.put(f"{role}/experts_busiest_max", float(busiest.max()))
    metrics.put(f"{role}/experts_busiest_mean", float(busiest.mean()))
    metrics.put(f"{role}/experts_entropy_min", float(entropy.min()))
    metrics.put(f"{role}/experts_entropy_mean", float(entropy.mean()))
    if replayed:
        metrics.put(f"{role}/experts_replayed_frac", found.changed / (found.tokens * layers))
    if coefs.balance > 0:
        metrics.put(f"{role}/balance_loss", found.balance / updates)
    if coefs.z > 0:
        metrics.put(f"{role}/router_z_loss", found.z / updates)


def record_engine_choices(metrics: StepMetrics, found: RoutingStatistics) -> None:
    """Record how many of the engine's choices of experts the trainer would not have made; ``found``: of the log-prob pass."""
    if found.tokens:
        metrics.put("mismatch/experts_frac", found.changed / (found.tokens * found.load.shape[0]))


def record_time_and_memory(metrics: StepMetrics, timer: PhaseTimer) -> None:
    total = timer.total
    for name, seconds in timer.seconds.items():
        metrics.extreme(f"time/{name}", seconds)
    if "generate" in timer.seconds:
        metrics.add("time/generate_mean", timer.seconds["generate"], 1)
    metrics.extreme("time/other", total - sum(timer.seconds.values()))
    metrics.extreme("time/step", total)
    metrics.extreme("memory/host_gib", _resident_bytes() / 2**30)
    if torch.cuda.is_available():
        metrics.extreme("memory/device_peak_gib", torch.cuda.max_memory_allocated() / 2**30)
        torch.cuda.reset_peak_memory_stats()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
