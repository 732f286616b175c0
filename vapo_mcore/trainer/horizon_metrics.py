"""Record metrics of runs with ``rollout.horizon``: open responses, ages of tokens, and the critic's values where responses were cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.profiles import PREDICTION_BINS
from vapo_mcore.algorithm.segments import all_reduce_sum
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.records.metrics import StepMetrics

HISTOGRAM_BINS = 16
"""Bins of segments (1, 2, ..., 16 and more) and of ages (0, 1, ..., 15 and more)."""


@dataclass(frozen=True)
class Cut:
    """The critic's value where a response was cut, and the later return. ``row``: row of the response in the step that ended it."""

    row: int
    value: float
    outcome: float


def record_horizon(metrics: StepMetrics, experience: Experience, counts: SamplingCounts, config: Config) -> None:
    """Record the open responses of a step with ``rollout.horizon``, and how old the tokens are that train."""
    found, rows, horizon = counts.horizon, experience.rows, config.rollout.horizon
    if found is None or horizon is None:
        return
    for name in ("open", "finished", "cut", "waiting"):
        metrics.put(f"horizon/{name}", getattr(found, name))
    metrics.put("tokens/reprefilled", found.reprefilled)
    metrics.put("horizon/moved_tokens", counts.moved_tokens)
    ended = (~rows.cut).tolist()
    sizes = [len(segments) for segments, whole in zip(rows.segments, ended, strict=True) if whole]
    metrics.put("horizon/segments_mean", sum(sizes) / len(sizes) if sizes else None)
    metrics.put("horizon/segments_max", max(sizes, default=None))
    metrics.put("horizon/segments_histogram", _histogram([(1, size - 1) for size in sizes]))
    if horizon.train == "segments":
        trained = int(experience.trained_lengths.sum())
        metrics.put("horizon/bootstrapped_frac", int(experience.trained_lengths[rows.cut].sum()) / trained if trained else None)
        record_cuts(metrics, cuts_that_ended(config, rows, found.cut_values), config.reward.interval)
        return
    limit = horizon.max_staleness
    trainable = experience.trainable.tolist()
    parts = [part for segments, trained in zip(rows.segments, trainable, strict=True) if trained for part in segments]
    parts = [(tokens, age) for tokens, age in parts if limit is None or age <= limit]
    tokens = sum(tokens for tokens, _ in parts)
    metrics.put("horizon/staleness_mean", sum(tokens * age for tokens, age in parts) / tokens if tokens else None)
    metrics.put("horizon/staleness_max", max((age for _, age in parts), default=None))
    metrics.put("horizon/staleness_histogram", _histogram(parts))
    stale = torch.zeros(len(rows), dtype=torch.int64) if limit is None else rows.stale_tokens(limit)
    metrics.put("horizon/stale_tokens", int(stale[rows.graded].sum()))
    metrics.put("horizon/stale_responses", int((stale[rows.graded] > 0).sum()))


def _histogram(entries: Sequence[tuple[int, int]]) -> list[int]:
    """Add up (count, bin) entries; the last bin includes everything beyond it."""
    bins = [0] * HISTOGRAM_BINS
    for count, place in entries:
        bins[min(place, HISTOGRAM_BINS - 1)] += count
    return bins


def values_at_cuts(experience: Experience, group: dist.ProcessGroup | None) -> dict[tuple[str, int], float]:
    """Return the critic's value after each response that was cut, by prompt id and sample index. Collective over data parallelism."""
    rows, batch = experience.rows, experience.batch
    cut = rows.cut
    if not bool(cut.any()):
        return {}
    assert experience.bootstrap_values is not None, "the critic's pass stores bootstrap values"
    table = torch.zeros(len(rows), dtype=torch.float64, device=experience.cu_seqlens.device)
    table[batch.row_ids.to(table.device)] = experience.bootstrap_values.double()  # each row is on one data-parallel rank
    values = all_reduce_sum(table, group).tolist()
    names = zip(rows.prompt_id, rows.sample_index.tolist(), strict=True)
    return {name: value for name, value, was_cut in zip(names, values, cut.tolist(), strict=True) if was_cut}


def cuts_that_ended(config: Config, rows: Rows, values: Sequence[tuple[int, int, float]]) -> list[Cut]:
    """Compare the critic's values at earlier cuts with the discounted rewards that came after them.

    ``values``: (row, sampled tokens before the cut, value) of responses that ended in this step; their ``reward`` is shaped. Responses
    without a verdict are left out and, with ``truncation: bootstrap``, those truncated: their return never came.
    """
    gamma = config.algorithm.advantage.gamma
    left_out = ~rows.graded | (rows.truncated if config.algorithm.advantage.truncation == "bootstrap" else False)
    skipped, rewards, lengths = left_out.tolist(), rows.reward.tolist(), rows.response_length.tolist()
    found = []
    for row, tokens, value in values:
        if skipped[row]:
            continue
        first = rows.place(row, tokens)
        later = [(rows.sampled_before(row, position), reward) for position, reward in rows.step_rewards[row] if position >= first]
        outcome = math.fsum(gamma ** (number - tokens) * reward for number, reward in [*later, (lengths[row] - 1, rewards[row])])
        found.append(Cut(row, value, outcome))
    return found


def record_cuts(metrics: StepMetrics, cuts: Sequence[Cut], interval: tuple[float, float]) -> None:
    """Record the bias of the values at cuts, its standard error and their calibration. ``interval``: ends of the bins of values.

    Cuts of one response share its return, so the standard error is that of the sums over each response.
    """
    count, low, width = len(cuts), interval[0], interval[1] - interval[0]
    bias = math.fsum(cut.value - cut.outcome for cut in cuts) / count if count else None
    of_row: dict[int, float] = {}
    bins: list[list[Cut]] = [[] for _ in range(PREDICTION_BINS)]
    for cut in cuts:
        of_row[cut.row] = of_row.get(cut.row, 0.0) + (cut.value - cut.outcome - (bias or 0.0))
        bins[min(max(math.floor((cut.value - low) / width * PREDICTION_BINS), 0), PREDICTION_BINS - 1)].append(cut)
    means = [
        [math.fsum(getattr(cut, name) for cut in part) / len(part) if part else None for part in bins] for name in ("value", "outcome")
    ]
    gaps = [len(part) * abs(v - r) for part, v, r in zip(bins, *means, strict=True) if v is not None and r is not None]
    metrics.put("horizon/cuts_ended", count)
    metrics.put("horizon/cut_value_bias", bias)
    spread = math.sqrt(math.fsum(error**2 for error in of_row.values())) / count if len(of_row) > 1 else None
    metrics.put("horizon/cut_value_bias_se", spread)
    metrics.put("horizon/cut_value_error", math.fsum(gaps) / count if count else None)
    metrics.put("critic/tokens_by_cut", [len(part) for part in bins])
    metrics.put("critic/values_by_cut", means[0])
    metrics.put("critic/returns_by_cut", means[1])


def record_cut_weight(metrics: StepMetrics, experience: Experience, lam: Tensor, gamma: float) -> None:
    """Record the mean weight of a cut state's value in the advantages of the step's tokens. ``lam``: float64 [n], of each response.

    It is gamma (gamma lambda)^k for the token k before the last one of a segment that was cut, and 0 in a response that has ended.
    """
    lengths = experience.trained_lengths.double()
    total = float(lengths.sum())
    if total == 0:
        metrics.put("horizon/cut_weight", None)
        return
    decay = gamma * lam
    sums = torch.where(decay < 1, (1 - decay**lengths) / (1 - decay).clamp(min=1e-300), lengths)
    metrics.put("horizon/cut_weight", float((gamma * sums)[experience.rows.cut].sum()) / total)
