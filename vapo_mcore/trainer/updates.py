"""Run the optimizer updates of a rollout: epochs over its mini-batches, first for the critic, then for the policy.

With fixed advantages and separate models, running all critic epochs before all policy epochs gives the same result as interleaving
them, and swaps the model on the device once instead of once per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch
import torch.distributed as dist

from vapo_mcore.algorithm.covariance import chosen_count, largest, random_scores, token_covariances, token_keys
from vapo_mcore.algorithm.histogram import outside
from vapo_mcore.algorithm.importance import mismatch_statistics
from vapo_mcore.algorithm.segments import broadcast_to_tokens
from vapo_mcore.algorithm.weights import positive_token_weights, token_weights
from vapo_mcore.config.architecture import ValueBins
from vapo_mcore.config.schema import Config
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.ragged import segment_positions, token_index
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES
from vapo_mcore.errors import StepBroken
from vapo_mcore.experience.batches import Experience, MiniBatch, shuffle_seed
from vapo_mcore.extensions.points import ROW_PREFIX
from vapo_mcore.megatron.engine import LossFunction, MegatronModel, StepResult, choices_name
from vapo_mcore.megatron.losses import COVARIANCE_KINDS, MISMATCH_STATISTIC, TERM_STATISTIC, CriticLoss, PolicyLoss
from vapo_mcore.megatron.optimizer import Skipped
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.routing import RouterCoefs
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.bad_updates import UpdateGuard
from vapo_mcore.trainer.step_metrics import record_routing

MOST_OUTSIDE = 0.01
"""Largest share of a rollout's returns outside the bounds of a categorical head."""
_WEIGHTS = ("policy_weights", "positive_weights", "value_weights", "policy_mask")


@dataclass(frozen=True)
class StoppedUpdate:
    """The update at which the skip limit was reached, with this rank's micro-batches as passed to the loss."""

    epoch: int
    minibatch: int
    result: StepResult
    microbatches: list[MicroBatch]


def update_critic(
    config: Config, model: MegatronModel, experience: Experience, metrics: StepMetrics, guard: UpdateGuard
) -> StoppedUpdate | None:
    """Run all critic updates of the rollout and record them in ``metrics``. Collective over all ranks.

    Returns the update at which ``guard``'s limit of consecutive skips was reached, else None.
    """
    bins = model.architecture.value_bins
    loss = CriticLoss(config.algorithm.value_loss.clip, bins)
    if bins is not None:
        require_returns_within(bins, experience, model.parallel, metrics)

    def weigh(microbatch: MicroBatch, minibatch: MiniBatch) -> MicroBatch:
        mask, cu_seqlens = microbatch.tensors["response_mask"], microbatch.layout.cu_seqlens
        return microbatch.with_tensors(value_weights=token_weights(mask, cu_seqlens, "token", None, minibatch.denominators))

    def record(result: StepResult) -> None:
        metrics.add("critic/loss", result.metrics["loss" if bins is None else "squared"], 1)
        if bins is not None:
            metrics.add("critic/cross_entropy", result.metrics["loss"], 1)
        metrics.add("critic/grad_norm", result.grad_norm, 1)
        metrics.add("critic/clip_frac", result.metrics["clipped"], result.metrics["tokens"])

    order = update_order(experience.minibatches, config.critic.epochs, config.critic.updates_per_rollout)
    return _update(config, "critic", model, experience, loss, order, weigh, record, metrics, guard)


def require_returns_within(bins: ValueBins, experience: Experience, parallel: ParallelContext, metrics: StepMetrics) -> None:
    """Count the returns that a categorical head cannot predict. A collective over data parallelism.

    Raises StepBroken, on all ranks, if they are more than ``MOST_OUTSIDE`` of the rollout's.
    """
    returns, mask = experience.batch["returns"], experience.mask
    beyond = outside(returns, mask, bins)
    counts = torch.stack([beyond.sum(), mask.sum()]).double()
    kept = returns[mask].double()
    extremes = torch.stack([-kept.min(), kept.max()]) if kept.numel() else counts.new_full((2,), -math.inf)
    if parallel.data_parallel_size > 1:
        dist.all_reduce(counts, group=parallel.data_parallel_group)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=parallel.data_parallel_group)
    share = float(counts[0] / counts[1].clamp(min=1.0))
    metrics.put("critic/returns_outside_frac", share)
    if share > MOST_OUTSIDE:
        raise StepBroken(
            f"critic: {share:.1%} of the returns lie outside [{bins.low:g}, {bins.high:g}], the bounds of its categorical head "
            f"(at most {MOST_OUTSIDE:.0%} may); they run from {-float(extremes[0]):g} to {float(extremes[1]):g}: give "
            "critic.categorical.low and high that contain the rewards, with penalties"
        )


def update_policy(
    config: Config, model: MegatronModel, experience: Experience, metrics: StepMetrics, guard: UpdateGuard, rollout: int
) -> StoppedUpdate | None:
    """Run all policy updates of the rollout. Returns like ``update_critic``. ``rollout``: its number; seeds the choice of ``clip_cov``."""
    loss = PolicyLoss(config, model.parallel.context_parallel_group)
    settings = config.algorithm.policy_loss
    for name in loss.tensors:
        if name.startswith(ROW_PREFIX):
            column = experience.on_rows(experience.rows_column(name.removeprefix(ROW_PREFIX)))
            experience.batch[name] = broadcast_to_tokens(column, experience.mask, experience.cu_seqlens)
    if settings.kind in COVARIANCE_KINDS:
        choose_covarying(config, experience, model.parallel, metrics, rollout)
    first = True

    def weigh(microbatch: MicroBatch, minibatch: MiniBatch) -> MicroBatch:
        mask, cu_seqlens = microbatch.tensors["response_mask"], microbatch.layout.cu_seqlens
        positive_mask = microbatch.tensors["positive_mask"]
        whole = mask | positive_mask if loss.segments else mask
        weighed = microbatch.with_tensors(
            policy_weights=token_weights(
                mask, cu_seqlens, settings.aggregation, config.rollout.max_response_length, minibatch.denominators
            ),
            positive_weights=positive_token_weights(whole, positive_mask, minibatch.denominators),
        )
        return weighed.with_tensors(response_mask=whole, policy_mask=mask) if loss.segments else weighed

    def record(result: StepResult) -> None:
        nonlocal first
        stats = result.metrics
        if first:
            metrics.add("policy/approx_kl_first", stats["approx_kl"], stats["tokens"])
            if loss.measure_mismatch:
                _record_mismatch(stats, metrics)
            first = False
        _record_policy(result, metrics)

    positive = sum(minibatch.denominators.positive_tokens for minibatch in experience.minibatches)
    metrics.put("policy/positive_tokens", positive)
    order = update_order(experience.minibatches, config.policy.epochs, None)
    return _update(config, "policy", model, experience, loss, order, weigh, record, metrics, guard, extra=("positive_mask",))


def choose_covarying(config: Config, experience: Experience, parallel: ParallelContext, metrics: StepMetrics, rollout: int) -> None:
    """Mark the tokens that ``kl_cov`` punishes or ``clip_cov`` leaves out, in ``experience.batch["covarying"]`` (bool), by mini-batch.

    A collective over data parallelism; the same tokens in any layout.
    """
    settings, kind = config.algorithm.policy_loss.covariance, config.algorithm.policy_loss.kind
    batch, cu_seqlens, group = experience.batch, experience.cu_seqlens, parallel.data_parallel_group
    lengths = cu_seqlens.diff().long()
    keys = token_keys(torch.repeat_interleave(batch.row_ids.to(cu_seqlens.device), lengths), segment_positions(lengths))
    chosen = torch.zeros_like(experience.mask)
    number = 0
    for minibatch in experience.minibatches:
        if minibatch.is_masked:
            continue
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *(microbatch.rows for microbatch in minibatch.microbatches)])
        index = token_index(cu_seqlens, rows.to(cu_seqlens.device))
        mask, key = experience.mask[index], keys[index]
        covariances = token_covariances(batch["old_logprobs"][index], batch["advantages"][index], mask, group)
        if kind == "clip_cov":
            candidates = mask & (covariances > settings.low) & (covariances < settings.high)
            scores = random_scores(key, shuffle_seed(config.seed, rollout))
        else:
            candidates, scores = mask, covariances
        tokens = minibatch.denominators.tokens
        chosen[index] = largest(scores, candidates, key, chosen_count(settings.fraction, tokens), group)
        number += tokens
    batch["covarying"] = chosen
    total = chosen.sum().double()
    if parallel.data_parallel_size > 1:
        dist.all_reduce(total, group=group)
    metrics.put("policy/covarying_frac", float(total) / number if number else None)


def update_order(minibatches: Sequence[MiniBatch], epochs: int, updates: int | None) -> list[tuple[int, int, MiniBatch]]:
    """Return (epoch, number, mini-batch) for each update.

    Without ``updates``: ``epochs`` passes over all mini-batches. With ``updates``: exactly that many updates, cycling through the
    mini-batches that have a trainable token.
    """
    numbered = list(enumerate(minibatches))
    if updates is None:
        return [(epoch, *entry) for epoch in range(epochs) for entry in numbered]
    trainable = [entry for entry in numbered if not entry[1].is_masked]
    return list(islice(((epoch, *entry) for epoch in count() for entry in trainable), updates)) if trainable else []


def _update(
    config: Config,
    role: str,
    model: MegatronModel,
    experience: Experience,
    loss: LossFunction,
    order: Sequence[tuple[int, int, MiniBatch]],
    weigh: Callable[[MicroBatch, MiniBatch], MicroBatch],
    record: Callable[[StepResult], None],
    metrics: StepMetrics,
    guard: UpdateGuard,
    extra: tuple[str, ...] = (),
) -> StoppedUpdate | None:
    """Run one update per mini-batch. Mini-batches without a trainable token are skipped on all ranks: the counts are replicated."""
    names = [name for name in (*loss.tensors, *extra) if name not in _WEIGHTS]
    # Without a log-prob pass the updates repeat the engine's choices themselves.
    choices = [choices_name(model.role), *([ENGINE_CHOICES] if model.role == "policy" else [])]
    repeated = [name for name in choices if name in experience.batch]
    names += repeated
    router = config.model.router
    coefs = RouterCoefs(router.balance_coef, router.z_coef)
    if model.routing is not None:
        model.routing.reset_statistics()
    masked = updates = 0
    skipped: list[Skipped] = []
    rate: float | None = None
    stopped: StoppedUpdate | None = None
    for epoch, number, minibatch in order:
        if minibatch.is_masked:
            masked += 1
            continue
        microbatches = [weigh(experience.with_tensors(part, names), minibatch) for part in minibatch.microbatches]
        result = model.train_step(microbatches, loss, is_spike=guard.is_spike, router_coefs=coefs)
        updates += 1
        guard.note(result.metrics["loss"], result.skipped)
        if result.skipped is None:
            rate = result.learning_rate
            record(result)
            continue
        skipped.append(result.skipped)
        if guard.must_stop:
            stopped = StoppedUpdate(epoch, number, result, microbatches)
            break
    if model.routing is not None:
        record_routing(metrics, role, model.routing.statistics(), coefs, updates, replayed=bool(repeated))
    metrics.put(f"{role}/lr", rate)
    metrics.put(f"{role}/updates_skipped", len(skipped))
    if guard.spike is not None:
        metrics.put(f"{role}/loss_spikes", skipped.count(Skipped.SPIKE))
    metrics.put(f"{role}/minibatches_masked", masked)
    return stopped


def _record_policy(result: StepResult, metrics: StepMetrics) -> None:
    stats = result.metrics
    metrics.add("policy/loss", stats["loss"], 1)
    metrics.add("policy/grad_norm", result.grad_norm, 1)
    metrics.add("policy/surrogate_loss", stats["surrogate"], 1)
    metrics.add("policy/nll_loss", stats["nll"], 1)
    if "kl" in stats:
        metrics.add("policy/kl_loss", stats["kl"], 1)
    for name in stats:
        if name.startswith(TERM_STATISTIC):
            metrics.add(f"policy/{name.removesuffix('/sum')}", stats[name], 1)
    names = {"approx_kl": "approx_kl", "clipped_high": "clip_frac_high", "clipped_low": "clip_frac_low", "clipped_dual": "clip_frac_dual"}
    for source, target in (names | {"ratio": "ratio_mean"}).items():
        metrics.add(f"policy/{target}", stats[source], stats["tokens"])


def _record_mismatch(stats: dict[str, float], metrics: StepMetrics) -> None:
    """Record the rollout/trainer mismatch from the first update's forward pass; used when there is no separate log-prob pass."""
    sums = {name.removeprefix(MISMATCH_STATISTIC): value for name, value in stats.items() if name.startswith(MISMATCH_STATISTIC)}
    for name, value in mismatch_statistics(sums).items():
        metrics.put(f"mismatch/{name}", value)
    metrics.add("policy/entropy", stats["entropy"], stats["tokens"])
