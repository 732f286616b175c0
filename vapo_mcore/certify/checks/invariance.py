"""Invariance of a step: loss and gradient norm depend neither on the packing of sequences nor on the layout (if the ranks allow
another); importance ratios and weights follow a known change of the log-probs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vapo_mcore.algorithm import importance
from vapo_mcore.certify.batches import MADE_ADVANTAGES, critic_batches, policy_batches, policy_loss
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.memory import release_free_memory
from vapo_mcore.certify.record import Measurement, fails, holds, not_applicable
from vapo_mcore.certify.tolerances import BY_NAME, judge
from vapo_mcore.config.schema import ImportanceCorrectionConfig, ParallelConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.megatron.engine import LossFunction, MegatronModel, StepResult
from vapo_mcore.megatron.losses import CriticLoss
from vapo_mcore.megatron.model import ValueHead
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.trainer.models import build_critic_alone, fill_policy

LOG_RATIO = 0.1
"""Change of the old log-probs; the ratio of 1.105 is inside the usual clips."""
TEXTS = 4
"""Fixed texts of a step; with more data-parallel ranks, one for each. Few, because a step runs in up to seven ways, and on CPUs its time is
that of reading weights and gradients once for each text."""
_NEAR = BY_NAME["invariance/known_change"].float32
FROZEN = "the loss does not see the change of the policy: old log-probs are overwritten, or the ratio or weight is frozen"


def run(bench: Bench) -> list[Measurement]:
    """Run steps that skip the update once the gradient norm is known. The statistics of the first step show the importance ratio.

    Data-parallel ranks hold different sequences, so a rank that is left out or counted twice changes loss and norm between layouts.
    """
    first = _policy_step(bench, bench.models.policy, bench.parallel, None)
    found = [_ratio(first), _surrogate(bench, first), *_weights(bench, first)]
    other = _policy_step(bench, bench.models.policy, bench.parallel, _all_packed(bench, bench.parallel))
    found += _same(bench, "policy, each sequence alone and all packed", first, other)
    values: list[StepResult] = []
    if bench.models.critic is not None:
        values = [_critic_step(bench, packs) for packs in (None, _all_packed(bench, bench.models.critic.parallel))]
        found += _same(bench, "critic, each sequence alone and all packed", *values)
    return found + _layouts(bench, first, values[0] if values else None)


def _texts(bench: Bench) -> list[list[int]]:
    """Return some of the fixed texts, one for each data-parallel rank if there are enough.

    Prompts and drawn texts alternate: two ranks then have gradients of different sizes, and a rank that is left out shows even in bfloat16.
    """
    layouts = [bench.parallel, *([bench.models.critic.parallel] if bench.models.critic is not None else [])]
    count = min(len(bench.sequences), max(TEXTS, *(layout.data_parallel_size for layout in layouts)))
    texts = bench.sequences[: count - 2]
    for place, drawn in zip((1, 3), bench.sequences[-2:], strict=True):
        texts.insert(place, drawn)
    return texts


def _all_packed(bench: Bench, parallel: ParallelContext) -> list[list[int]]:
    """Return the texts in one pack for each data-parallel rank of a layout."""
    ranks = parallel.data_parallel_size
    return [list(range(len(_texts(bench))))[rank::ranks] for rank in range(ranks)]


def _ratio(step: StepResult) -> Measurement:
    """Check that the loss sees the ratio of old log-probs that were moved by a known amount."""
    what, stats = "importance ratio", step.metrics
    ratio, kl = stats["ratio"] / stats["tokens"], stats["approx_kl"] / stats["tokens"]
    expected, expected_kl = math.exp(LOG_RATIO), math.exp(LOG_RATIO) - 1 - LOG_RATIO
    tolerance = f"{expected:.4f} and {expected_kl:.5f} (exp(d) and exp(d) - 1 - d for d = {LOG_RATIO}), within {_NEAR:.0%}"
    good = abs(ratio / expected - 1) <= _NEAR and abs(kl / expected_kl - 1) <= _NEAR
    shown = f"ratio {ratio:.4f}, KL {kl:.5f}"
    return holds(what, shown, tolerance, ratio) if good else fails(what, shown, tolerance, FROZEN, ratio)


def _surrogate(bench: Bench, step: StepResult) -> Measurement:
    """Check the surrogate: with this ratio at every token, inside the clip, it is -ratio times the mean advantage."""
    what, loss = "surrogate", bench.config.algorithm.policy_loss
    if loss.kind != "ppo":
        return not_applicable(what, f"its value is known for algorithm.policy_loss.kind ppo, not for {loss.kind}")
    if math.exp(LOG_RATIO) > 1 + loss.clip_high:
        return not_applicable(what, f"a ratio of {math.exp(LOG_RATIO):.3f} is beyond the recipe's clip")
    advantages = [MADE_ADVANTAGES[token % 2] for sequence in _texts(bench) for token in sequence[1:]]
    expected, measured = -math.exp(LOG_RATIO) * sum(advantages) / len(advantages), step.metrics["surrogate"]
    tolerance = f"{expected:.6g} (the mean advantage times minus the ratio), within {_NEAR:.0%} of the ratio"
    shown = f"{measured:.6g}"
    if abs(measured - expected) <= _NEAR * math.exp(LOG_RATIO):
        return holds(what, shown, tolerance, measured)
    remedy = "the loss does not follow the advantages: their sign, position (shifted by a token) or weights are wrong"
    return fails(what, shown, tolerance, remedy, measured)


def _weights(bench: Bench, first: StepResult) -> list[Measurement]:
    """Check, with an importance correction, that the weights follow the log-probs and scale the loss."""
    correction = bench.config.algorithm.policy_loss.importance_correction
    if correction.kind == "off":
        return [not_applicable("importance weight", "algorithm.policy_loss.importance_correction is off")]
    twice = _policy_step(bench, bench.models.policy, bench.parallel, None, importance_weight=2.0)
    return [_weight(correction), _weighted(first.metrics["surrogate"], twice.metrics["surrogate"])]


def _weight(correction: ImportanceCorrectionConfig) -> Measurement:
    """Check the weights of four tokens whose log-probs moved by a known amount; a product over the response moves four times as much."""
    what, ones = "importance weight", torch.ones(4)
    wanted = math.exp(LOG_RATIO if correction.kind == "sequence_product_mask" else LOG_RATIO / 4)
    if wanted > correction.cap or (correction.kind != "token_truncate" and wanted < correction.low):
        return not_applicable(what, f"a weight of {wanted:.3f} is beyond the recipe's bounds")
    read = (LOG_RATIO / 4 * ones, 0 * ones, ones.bool(), torch.tensor([0, 4]))
    weight = float(importance.importance_weights(*read, kind=correction.kind, cap=correction.cap, low=correction.low).mean())
    shown, tolerance = f"{weight:.4f}", f"{wanted:.4f}, within {_NEAR:.0%}"
    good = abs(weight / wanted - 1) <= _NEAR
    return holds(what, shown, tolerance, weight) if good else fails(what, shown, tolerance, FROZEN, weight)


def _weighted(once: float, twice: float) -> Measurement:
    """Check that weights of 2 instead of 1 double the surrogate."""
    what, tolerance = "importance weight in the loss", f"weights of 2 double the surrogate, within {_NEAR:.0%}"
    shown = f"surrogate {once:.6g} with weights of 1, {twice:.6g} with weights of 2"
    good = once != 0 and abs(twice / once / 2 - 1) <= _NEAR
    return holds(what, shown, tolerance, twice) if good else fails(what, shown, tolerance, FROZEN, twice)


def _policy_step(bench: Bench, model: MegatronModel, parallel: ParallelContext, packs: Any, importance_weight: float = 1.0) -> StepResult:
    microbatches, loss = bench.microbatches(_texts(bench), packs, parallel, shared=True), policy_loss(bench, parallel)

    def step() -> StepResult:
        batches = policy_batches(model, microbatches, bench.config.rollout.temperature, LOG_RATIO, _trained(bench))
        batches = [batch.with_tensors(importance_weights=importance_weight * batch.tensors["importance_weights"]) for batch in batches]
        return _without_update(model, batches, loss)

    if model is not bench.models.policy:
        return step()
    with bench.on_device("policy_update"):
        return step()


def _trained(bench: Bench) -> int:
    """Return the number of tokens of the fixed texts that carry a loss: all but the first of each text."""
    return sum(len(sequence) - 1 for sequence in _texts(bench))


def _without_update(model: MegatronModel, batches: list[MicroBatch], loss: LossFunction) -> StepResult:
    """Return loss, statistics and gradient norm of a step without its update: weights and optimizer state do not change."""
    result = model.train_step(batches, loss, is_spike=lambda _: True)
    assert result.skipped is not None
    return result


def _critic_step(bench: Bench, packs: Any) -> StepResult:
    with bench.on_device("critic_update") as models:
        assert models.critic is not None
        return _step_of_critic(bench, models.critic, packs)


def _step_of_critic(bench: Bench, critic: MegatronModel, packs: Any) -> StepResult:
    loss = CriticLoss(None, critic.architecture.value_bins)
    batches = critic_batches(critic, bench.microbatches(_texts(bench), packs, critic.parallel, shared=True), _trained(bench))
    with _filled_head(critic):
        return _without_update(critic, batches, loss)


@contextmanager
def _filled_head(critic: MegatronModel) -> Iterator[None]:
    """Give the value head known weights inside the block: a new head may be zero, and then all gradients below it are zero."""
    heads = [module for chunk in critic.chunks for module in chunk.modules() if isinstance(module, ValueHead)]
    kept = [head.weight.detach().clone() for head in heads]
    with torch.no_grad():
        for head in heads:
            numbers = torch.arange(head.weight.numel(), dtype=torch.float32, device=head.weight.device)
            head.weight.copy_(0.02 * torch.sin(numbers + 1).view_as(head.weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for head, weight in zip(heads, kept, strict=True):
                head.weight.copy_(weight)


def _same(bench: Bench, what: str, one: StepResult, other: StepResult) -> list[Measurement]:
    remedy = "the step depends on how it is computed: sequences see one another, or gradients are scaled or reduced twice"
    values = (("loss", one.metrics["loss"], other.metrics["loss"]), ("gradient norm", one.grad_norm, other.grad_norm))
    return [
        judge(
            f"{name}, {what}",
            abs(second - first) / max(abs(first), 1e-12),
            f"invariance/{name.replace(' ', '_')}",
            bench.dtype,
            remedy=remedy,
            suffix=f" relative: {first:.6g} and {second:.6g}",
        )
        for name, first, second in values
    ]


def _others(bench: Bench) -> Iterator[ParallelConfig]:
    """Yield the layouts of the same ranks that the model allows, except the recipe's."""
    world, arch, own = bench.parallel.world_size, bench.architecture, bench.config.parallel
    for tp, pp, cp in ((1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 1, 1)):
        if world % (tp * pp * cp) or arch.num_attention_heads % tp or arch.num_key_value_heads % tp or arch.num_layers % pp:
            continue
        if (tp, pp, cp) == (own.tensor_model_parallel_size, own.pipeline_model_parallel_size, own.context_parallel_size):
            continue
        yield ParallelConfig(
            world_size=world,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            timeout_minutes=own.timeout_minutes,
        )


def _layouts(bench: Bench, policy: StepResult, critic: StepResult | None) -> list[Measurement]:
    """Compare with a second policy with the same weights in other layouts, and with a second critic in the first of these layouts.

    Rebuilds the recipe's process groups afterwards.
    """
    what = "another layout"
    if bench.parallel.world_size == 1:
        return [not_applicable(what, "there is one rank")]
    found = []
    if "sync" in bench.__dict__:
        bench.sync.put_to_sleep()
    try:
        for number, layout in enumerate(list(_others(bench))[:2]):
            parallel = initialize_parallel(layout)
            named = f"the recipe's layout and {_degrees(parallel)}"
            model = _policy_in(bench, parallel)
            found += _same(bench, f"policy, {named}", policy, _policy_step(bench, model, parallel, None))
            del model
            release_free_memory()
            if critic is not None and number == 0:
                other = build_critic_alone(bench.config, parallel, lambda _: None).critic
                assert other is not None
                found += _same(bench, f"critic, {named}", critic, _step_of_critic(bench, other, None))
                del other
                release_free_memory()
    finally:
        initialize_parallel(bench.config.parallel)
    return found or [not_applicable(what, "the model allows no other layout on these ranks")]


def _degrees(parallel: ParallelContext) -> str:
    return (
        f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size} x context "
        f"{parallel.context_parallel_size} x data {parallel.data_parallel_size}"
    )


def _policy_in(bench: Bench, parallel: ParallelContext) -> MegatronModel:
    """Build a policy with the recipe's initial weights in another layout."""
    config = bench.config
    return MegatronModel(
        "policy",
        bench.architecture,
        config.model,
        parallel,
        load_weights=lambda chunks: fill_policy(chunks, config, bench.architecture, parallel, lambda _: None),
        optimizer=config.policy.optimizer,
        unknown_token_ids=bench.unknown_token_ids,
    )
