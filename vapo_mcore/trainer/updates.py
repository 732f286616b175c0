"""Run the optimizer updates of a rollout: epochs over its mini-batches, first for the critic, then for the policy.

With fixed advantages and separate models, running all critic epochs before all policy epochs gives the same result as interleaving
them, and swaps the model on the device once instead of once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice

from vapo_mcore.algorithm.segments import broadcast_to_tokens
from vapo_mcore.algorithm.weights import positive_token_weights, token_weights
from vapo_mcore.config.schema import Config
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.experience.batches import Experience, MiniBatch
from vapo_mcore.extensions.points import ROW_PREFIX
from vapo_mcore.megatron.engine import LossFunction, MegatronModel, StepResult
from vapo_mcore.megatron.losses import TERM_STATISTIC, CriticLoss, PolicyLoss
from vapo_mcore.megatron.optimizer import Skipped
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.bad_updates import UpdateGuard

_WEIGHTS = ("policy_weights", "positive_weights", "value_weights")


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
    loss = CriticLoss(config.algorithm.value_loss.clip)

    def weigh(microbatch: MicroBatch, minibatch: MiniBatch) -> MicroBatch:
        mask, cu_seqlens = microbatch.tensors["response_mask"], microbatch.layout.cu_seqlens
        return microbatch.with_tensors(value_weights=token_weights(mask, cu_seqlens, "token", None, minibatch.denominators))

    def record(result: StepResult) -> None:
        metrics.add("critic/loss", result.metrics["loss"], 1)
        metrics.add("critic/grad_norm", result.grad_norm, 1)
        metrics.add("critic/clip_frac", result.metrics["clip"], result.metrics["tokens"])

    order = update_order(experience.minibatches, config.critic.epochs, config.critic.updates_per_rollout)
    return _update("critic", model, experience, loss, order, weigh, record, metrics, guard)


def update_policy(
    config: Config, model: MegatronModel, experience: Experience, metrics: StepMetrics, guard: UpdateGuard
) -> StoppedUpdate | None:
    """Run all policy updates of the rollout. Returns like ``update_critic``."""
    loss = PolicyLoss(config, model.parallel.context_parallel_group)
    settings = config.algorithm.policy_loss
    for name in loss.tensors:
        if name.startswith(ROW_PREFIX):
            column = experience.on_rows(experience.rows_column(name.removeprefix(ROW_PREFIX)))
            experience.batch[name] = broadcast_to_tokens(column, experience.mask, experience.cu_seqlens)
    first = True

    def weigh(microbatch: MicroBatch, minibatch: MiniBatch) -> MicroBatch:
        mask, cu_seqlens = microbatch.tensors["response_mask"], microbatch.layout.cu_seqlens
        return microbatch.with_tensors(
            policy_weights=token_weights(
                mask, cu_seqlens, settings.aggregation, config.rollout.max_response_length, minibatch.denominators
            ),
            positive_weights=positive_token_weights(mask, microbatch.tensors["positive_mask"], minibatch.denominators),
        )

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
    return _update("policy", model, experience, loss, order, weigh, record, metrics, guard, extra=("positive_mask",))


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
    masked = 0
    skipped: list[Skipped] = []
    rate: float | None = None
    stopped: StoppedUpdate | None = None
    for epoch, number, minibatch in order:
        if minibatch.is_masked:
            masked += 1
            continue
        microbatches = [weigh(experience.with_tensors(part, names), minibatch) for part in minibatch.microbatches]
        result = model.train_step(microbatches, loss, is_spike=guard.is_spike)
        guard.note(result.metrics["loss"], result.skipped)
        if result.skipped is None:
            rate = result.learning_rate
            record(result)
            continue
        skipped.append(result.skipped)
        if guard.must_stop:
            stopped = StoppedUpdate(epoch, number, result, microbatches)
            break
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
    names = {"approx_kl": "approx_kl", "clip_high": "clip_frac_high", "clip_low": "clip_frac_low", "clip_dual": "clip_frac_dual"}
    for source, target in (names | {"ratio": "ratio_mean"}).items():
        metrics.add(f"policy/{target}", stats[source], stats["tokens"])


def _record_mismatch(stats: dict[str, float], metrics: StepMetrics) -> None:
    """Record the rollout/trainer mismatch from the first update's forward pass; used when there is no separate log-prob pass."""
    tokens = stats["tokens"]
    metrics.put("mismatch/logprob_abs_mean", stats["mismatch_abs"] / tokens)
    metrics.put("mismatch/logprob_abs_max", stats["mismatch_abs_max"])
    metrics.put("mismatch/kl", stats["approx_kl"] / tokens)
    metrics.put("mismatch/ess", stats["mismatch_ratio"] ** 2 / (tokens * stats["mismatch_ratio_squared"]))
    metrics.put("mismatch/beyond_cap_frac", stats["mismatch_beyond_cap"] / tokens)
    metrics.add("policy/entropy", stats["entropy"], tokens)
