"""The rules. Each is a pure function of the rows of one stage (oldest first) that returns its evidence, or None.

A rule returns None until its metrics have been measured in enough steps. Undefined (None) and absent numbers are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from vapo_mcore.config.schema import Config, DiagnosisConfig
from vapo_mcore.config.schema.diagnosis import (
    BusiestExpertRule,
    ClipRule,
    CountRule,
    CriticStuckRule,
    EntropyRule,
    ExplainedVarianceRule,
    FirstKlRule,
    HorizonBiasRule,
    LambdaZeroRule,
    LengthRule,
    MismatchRule,
    StaleWeightsRule,
    TruncationRule,
    UniformGroupsRule,
    ValueLossRule,
)
from vapo_mcore.config.verifiers import UNGRADED

Row = Mapping[str, Any]
Rows = Sequence[Row]

FIRST_KL_LIMIT = {"float32": 1e-6, "bfloat16": 1e-3}
"""Largest k3 estimate between old and new log-probs before a step's first update."""
MISMATCH_LIMIT = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest mean absolute difference between trainer's and rollout's log-probs of the sampled tokens."""
PUBLISHED_UPDATES = 800
"""Approximate number of updates in VAPO's value pretraining (50 rollouts of 8,192 responses in mini-batches of 512; arXiv:2504.05118)."""
STALE_FLOOR = {"float32": 1e-4, "bfloat16": 2e-2}
"""Smaller differences are rounding, even if they have grown many times over."""


@dataclass(frozen=True)
class Context:
    """Settings that rules read besides their thresholds."""

    dtype: str
    group_size: int
    recomputes_logprobs: bool
    critic_lr: float | None = None  # None: no critic
    horizon: int | None = None  # tokens; None: off
    max_response_length: int = 0

    @classmethod
    def of(cls, config: Config) -> Context:
        rollout = config.rollout
        return cls(
            config.model.dtype,
            config.batch.responses_per_prompt,
            rollout.old_logprobs == "recompute",
            config.critic.optimizer.lr if config.uses_critic else None,
            None if rollout.horizon is None else rollout.horizon.tokens,
            rollout.max_response_length,
        )


def values_of(rows: Rows, key: str) -> list[float]:
    """Return the numbers of ``key``, oldest first; rows without one are left out."""
    return [row[key] for row in rows if row.get(key) is not None]


def recent(rows: Rows, key: str, window: int) -> list[float]:
    """Return the numbers of ``key`` in the last ``window`` rows; none unless at least half of a full window have one."""
    if len(rows) < window:
        return []
    found = values_of(rows[-window:], key)
    return found if 2 * len(found) >= window else []


def first_and_last(rows: Rows, key: str, window: int) -> tuple[float, float] | None:
    """Return the means of the first and of the last ``window`` numbers of ``key``; None until there are two windows."""
    found = values_of(rows, key)
    return (fmean(found[:window]), fmean(found[-window:])) if len(found) >= 2 * window else None


def _steps(rows: Rows, window: int) -> str:
    first, last = rows[-min(window, len(rows))]["step"], rows[-1]["step"]
    return f"step {last}" if first == last else f"steps {first} to {last}"


def explained_variance(rows: Rows, rule: ExplainedVarianceRule, context: Context) -> str | None:
    """Find explained variance below the threshold by more than twice its standard error: a new critic hovers around 0."""
    return _explains_less(rows, rule)


def critic_stuck(rows: Rows, rule: CriticStuckRule, context: Context) -> str | None:
    """Find low explained variance over a longer window, with a threshold above 0: a critic that neither harms nor helps.

    Advises more updates per rollout until the critic has made about as many as published value pretraining, then a higher rate.
    """
    evidence = _explains_less(rows, rule)
    made = values_of(rows, "critic/updates")
    if evidence is None or not made:
        return evidence
    total = int(made[-1])
    so_far = f"{evidence}; the critic has made {total} updates until {_steps(rows, 1)}, value pretraining included"
    if total < PUBLISHED_UPDATES:
        advice = f"critic.updates_per_rollout: {math.ceil(PUBLISHED_UPDATES / len(made))} makes as many"
        return f"{so_far}, and published value pretraining makes about {PUBLISHED_UPDATES}: {advice}"
    rate = "" if context.critic_lr is None else f", now {context.critic_lr:g}: try {3 * context.critic_lr:g}"
    return f"{so_far}, as many as published value pretraining: look at critic.optimizer.lr{rate}"


def _explains_less(rows: Rows, rule: ExplainedVarianceRule | CriticStuckRule) -> str | None:
    """Test the explained variance of Monte-Carlo returns or, in rows of older versions, which did not log it, of the critic's targets."""
    logged = "critic/explained_variance_mc"
    key = logged if any(logged in row for row in rows[-rule.window :]) else "critic/explained_variance"
    found = recent(rows, key, rule.window)
    if not found:
        return None
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    if fmean(found) + 2 * error >= rule.below:
        return None
    evidence = f"{key} was {fmean(found):.3f} in the mean of {_steps(rows, rule.window)} (standard error {error:.3f})"
    return f"{evidence}, below {rule.below:g}"


def value_loss_rising(rows: Rows, rule: ValueLossRule, context: Context) -> str | None:
    """Compare losses divided by that of the best constant, Var(R) / 2: the loss of a critic that learns rises with Var(R)."""
    measured = [row for row in rows if row.get("critic/loss") is not None and (row.get("critic/returns_std") or 0.0) > 0.0]
    if len(measured) < 2 * rule.window:
        return None
    losses = [row["critic/loss"] for row in measured]
    relative = [2.0 * row["critic/loss"] / row["critic/returns_std"] ** 2 for row in measured]
    best, at = _lowest_window(relative[: -rule.window], rule.window)
    now, loss_now, loss_then = fmean(relative[-rule.window :]), fmean(losses[-rule.window :]), fmean(losses[at : at + rule.window])
    if now < rule.rise * best or loss_now <= loss_then:
        return None
    then = _steps(measured[: at + rule.window], rule.window)
    return (
        f"critic/loss rose from {loss_then:.4g} ({then}) to {loss_now:.4g} ({_steps(measured, rule.window)}); relative to the best "
        f"constant prediction from {best:.2f} to {now:.2f}"
    )


def _lowest_window(values: Sequence[float], window: int) -> tuple[float, int]:
    """Return the smallest mean of ``window`` consecutive values and the index of their first."""
    best, at, total = math.inf, 0, 0.0
    for end, value in enumerate(values, 1):
        total += value - (values[end - 1 - window] if end > window else 0.0)
        if end >= window and total / window < best:
            best, at = total / window, end - window
    return best, at


def entropy_collapse(rows: Rows, rule: EntropyRule, context: Context) -> str | None:
    means = first_and_last(rows, "policy/entropy", rule.window)
    if means is None or means[1] >= rule.fraction * means[0]:
        return None
    return f"policy/entropy fell from {means[0]:.3g} to {means[1]:.3g} ({_steps(rows, rule.window)}), below {rule.fraction:g} of its start"


def length_collapse(rows: Rows, rule: LengthRule, context: Context) -> str | None:
    """Find falling lengths without rising accuracy: shorter answers are a failure unless more of them are right."""
    lengths, accuracies = (first_and_last(rows, key, rule.window) for key in ("response/length_mean", "accuracy/mean"))
    if lengths is None or accuracies is None or lengths[1] >= rule.fraction * lengths[0] or accuracies[1] > accuracies[0]:
        return None
    return (
        f"response/length_mean fell from {lengths[0]:.1f} to {lengths[1]:.1f} tokens ({_steps(rows, rule.window)}), below "
        f"{rule.fraction:g} of its start, and accuracy from {accuracies[0]:.3f} to {accuracies[1]:.3f}"
    )


def truncation_rising(rows: Rows, rule: TruncationRule, context: Context) -> str | None:
    """Compare with the lowest window, not the first: a share that starts high and falls may rise again."""
    fractions = values_of(rows, "response/truncated_frac")
    if len(fractions) < 2 * rule.window:
        return None
    last = fmean(fractions[-rule.window :])
    lowest = min(fmean(fractions[start : start + rule.window]) for start in range(len(fractions) - 2 * rule.window + 1))
    if last - lowest <= rule.rise:
        return None
    return (
        f"response/truncated_frac rose from a mean of {lowest:.3f} to {last:.3f} ({_steps(rows, rule.window)}), by more than {rule.rise:g}"
    )


def clip_fraction(rows: Rows, rule: ClipRule, context: Context) -> str | None:
    high, low = (recent(rows, f"policy/clip_frac_{side}", rule.window) for side in ("high", "low"))
    if not high or not low or fmean(high) + fmean(low) <= rule.above:
        return None
    return (
        f"{fmean(high) + fmean(low):.3f} of the tokens were held by a clip in {_steps(rows, rule.window)} "
        f"(upper {fmean(high):.3f}, lower {fmean(low):.3f}), above {rule.above:g}"
    )


def rollout_mismatch(rows: Rows, rule: MismatchRule, context: Context) -> str | None:
    limit = MISMATCH_LIMIT[context.dtype] if rule.above is None else rule.above
    found = recent(rows, "mismatch/logprob_abs_mean", rule.window)
    if not found or fmean(found) <= limit:
        return None
    return f"mismatch/logprob_abs_mean = {fmean(found):.2e} in {_steps(rows, rule.window)}, above {limit:.0e} ({context.dtype})"


def first_step_kl(rows: Rows, rule: FirstKlRule, context: Context) -> str | None:
    if not context.recomputes_logprobs:
        return None
    limit = FIRST_KL_LIMIT[context.dtype] if rule.above is None else rule.above
    found = recent(rows, "policy/approx_kl_first", 1)
    if not found or found[0] <= limit:
        return None
    return f"policy/approx_kl_first = {found[0]:.2e} in {_steps(rows, 1)}, above {limit:.0e} ({context.dtype})"


def stale_weights(rows: Rows, rule: StaleWeightsRule, context: Context) -> str | None:
    """Find a log-prob mismatch many times that of the first step, in which sampler and trainer have the same weights.

    The mismatch of the first step is rounding. A sampler that misses weight syncs makes it grow.
    """
    found = values_of(rows, "mismatch/logprob_abs_mean")
    if len(found) <= rule.window:
        return None
    limit = max(rule.growth * found[0], STALE_FLOOR[context.dtype])
    last = found[-rule.window :]
    if min(last) <= limit:
        return None
    return (
        f"mismatch/logprob_abs_mean was {found[0]:.1e} before the first update and is {fmean(last):.1e} in {_steps(rows, rule.window)}, "
        f"more than {limit:.1e}: the sampler seems to lag behind the policy"
    )


def lambda_zero(rows: Rows, rule: LambdaZeroRule, context: Context) -> str | None:
    found = recent(rows, "gae/lambda_zero_frac", rule.window)
    if not found or fmean(found) <= rule.above:
        return None
    lengths = recent(rows, "response/length_mean", rule.window)
    length = f"; the mean response has {fmean(lengths):.0f} tokens" if lengths else ""
    return f"lambda was 0 for {fmean(found):.2f} of the responses in {_steps(rows, rule.window)}, above {rule.above:g}{length}"


def uniform_groups(rows: Rows, rule: UniformGroupsRule, context: Context) -> str | None:
    right, wrong = (recent(rows, f"groups/all_{kind}_frac", rule.window) for kind in ("right", "wrong"))
    if context.group_size == 1 or not right or not wrong or fmean(right) + fmean(wrong) <= rule.above:
        return None
    return (
        f"{fmean(right) + fmean(wrong):.2f} of the groups had equal verdicts in {_steps(rows, rule.window)} "
        f"(all right {fmean(right):.2f}, all wrong {fmean(wrong):.2f}), above {rule.above:g}"
    )


def busiest_expert(rows: Rows, rule: BusiestExpertRule, context: Context) -> str | None:
    found = recent(rows, "policy/experts_busiest_max", rule.window)
    if not found or fmean(found) <= rule.above:
        return None
    entropy = recent(rows, "policy/experts_entropy_min", rule.window)
    lowest = f"; the lowest entropy of a layer's load was {fmean(entropy):.2f} of an even one's" if entropy else ""
    return f"one expert of a layer took {fmean(found):.2f} of the tokens in {_steps(rows, rule.window)}, above {rule.above:g}{lowest}"


def grader_failures(rows: Rows, rule: CountRule, context: Context) -> str | None:
    failed, asked = (sum(values_of(rows[-rule.window :], key)) for key in ("grading/failed", "response/count"))
    if failed <= rule.above * asked:
        return None
    causes = {text: sum(values_of(rows[-rule.window :], f"grading/failed_{cause}")) for cause, text in UNGRADED.items()}
    why = "; ".join(f"{count:.0f}: {text}" for text, count in causes.items() if count)
    evidence = f"{failed:.0f} of {asked:.0f} responses had no verdict in {_steps(rows, rule.window)} and were left out"
    return f"{evidence} ({why})" if why else evidence


def missed_ends(rows: Rows, rule: CountRule, context: Context) -> str | None:
    missed, asked = (sum(values_of(rows[-rule.window :], key)) for key in ("response/missed_end", "response/count"))
    if missed <= rule.above * asked:
        return None
    return f"{missed:.0f} of {asked:.0f} responses were truncated in {_steps(rows, rule.window)} though they have an end-of-turn text"


def skipped_updates(rows: Rows, rule: CountRule, context: Context) -> str | None:
    found = {role: sum(values_of(rows[-rule.window :], f"{role}/updates_skipped")) for role in ("policy", "critic")}
    done = sum(_updates(rows, rule.window, role) for role in found)
    skipped = sum(found.values())
    if skipped <= rule.above * (done + skipped):
        return None
    return (
        f"{found['policy']:.0f} updates of the policy and {found['critic']:.0f} of the critic were skipped in {_steps(rows, rule.window)}"
    )


def _updates(rows: Rows, window: int, role: str) -> float:
    """Return the number of updates in the last ``window`` rows, from the cumulative count."""
    counts = [0.0, *values_of(rows, f"{role}/updates")]
    return counts[-1] - counts[max(0, len(counts) - 1 - window)]


def untrained_minibatches(rows: Rows, rule: CountRule, context: Context) -> str | None:
    last = rows[-rule.window :]
    found = {role: sum(values_of(last, f"{role}/minibatches_masked")) for role in ("policy", "critic")}
    # With rollout.horizon a step may have no finished response, or no complete group.
    empty = [row for row in last if row.get("tokens/trained") == 0 and not (row.get("horizon/open") and row["response/count"] == 0)]
    done = sum(_updates(rows, rule.window, role) for role in found)
    masked = sum(found.values())
    if not empty and masked <= rule.above * (done + masked):
        return None
    nothing = f"; {len(empty)} of these steps had no token to train on" if empty else ""
    return (
        f"{found['policy']:.0f} mini-batches of the policy and {found['critic']:.0f} of the critic had no trainable token in "
        f"{_steps(rows, rule.window)}{nothing}"
    )


def horizon_bias(rows: Rows, rule: HorizonBiasRule, context: Context) -> str | None:
    """Compare the critic's values at cuts with the later returns, multiplied by the weight of these values in the advantages.

    That weight falls as 1 / H, because longer segments have fewer cuts; so the advised H grows in proportion to the bias.
    """
    keys = ("horizon/cuts_ended", "horizon/cut_value_bias", "horizon/cut_value_bias_se", "horizon/cut_weight", "advantages/std")
    known = [row for row in rows[-rule.window :] if all(row.get(key) is not None for key in keys)]
    if context.horizon is None or len(rows) < rule.window or 2 * len(known) < rule.window:
        return None
    counts, biases, errors, weights, spreads = ([row[key] for row in known] for key in keys)
    cuts = sum(counts)
    bias = sum(map(math.prod, zip(counts, biases, strict=True))) / cuts
    error = math.sqrt(sum((count * se) ** 2 for count, se in zip(counts, errors, strict=True))) / cuts
    weight, spread = fmean(weights), fmean(spreads)
    share = abs(bias) * weight / spread if spread > 0 else math.inf
    if share <= rule.above or abs(bias) <= 2 * error:
        return None
    longer = math.ceil(context.horizon * share / rule.above) if math.isfinite(share) else context.max_response_length
    advice = f"rollout.horizon.tokens: {longer}" if longer < context.max_response_length else "no horizon below the longest response"
    return (
        f"the critic's value at a cut was {abs(bias):.3g} {'above' if bias > 0 else 'below'} the return that came later in "
        f"{_steps(rows, rule.window)} ({cuts} cuts, standard error {error:.2g}); with a mean weight of {weight:.2g} in the advantages this "
        f"shifts them by {share:.2f} of their standard deviation {spread:.3g}, above {rule.above:g}; rollout.horizon.tokens is "
        f"{context.horizon}: with such a critic, {advice}"
    )


@dataclass(frozen=True)
class Rule:
    """A rule. ``section``: its thresholds, the key ``name`` of ``diagnosis:``. ``pretraining``: also applies in value pretraining."""

    name: str
    section: Callable[[DiagnosisConfig], Any]
    check: Callable[[Rows, Any, Context], str | None]
    means: str
    remedy: str
    pretraining: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        "explained_variance",
        lambda d: d.explained_variance,
        explained_variance,
        "the critic predicts worse than a constant, so its advantages are noise",
        "more value pretraining, a higher critic learning rate or more critic epochs; lambda_critic = 1",
    ),
    Rule(
        "critic_stuck",
        lambda d: d.critic_stuck,
        critic_stuck,
        "the critic explains next to nothing, so GAE with it is REINFORCE with a constant baseline",
        "more passes over each rollout (critic.updates_per_rollout, critic.epochs), more value pretraining, a higher critic learning rate; "
        "on tasks whose outcome cannot be read off the text before its end no critic does better, and a group baseline costs less",
    ),
    Rule(
        "value_loss_rising",
        lambda d: d.value_loss_rising,
        value_loss_rising,
        "the critic gets worse relative to what it has to predict",
        "a lower critic learning rate, a value clip, fewer critic epochs; look for a change of the reward's scale",
    ),
    Rule(
        "entropy_collapse",
        lambda d: d.entropy_collapse,
        entropy_collapse,
        "the policy has stopped exploring",
        "Clip-Higher (clip_high 0.28), a lower policy learning rate, an entropy bonus, a smaller positive_lm.coef, harder prompts",
    ),
    Rule(
        "length_collapse",
        lambda d: d.length_collapse,
        length_collapse,
        "responses shrink without getting better, which in PPO without value pretraining is its usual end",
        "value pretraining, decoupled GAE (lambda_critic = 1), a longer reach of the policy's lambda; check overlong penalties",
    ),
    Rule(
        "truncation_rising",
        lambda d: d.truncation_rising,
        truncation_rising,
        "the policy learns to go on until the limit; where lambda is small, the missing reward does not reach the token that went wrong",
        "read truncated responses in samples/; reward.overlong if they are long answers, a larger alpha or lambda_policy if they are "
        "run-on text, a longer max_response_length if they are right so far",
    ),
    Rule(
        "clip_fraction",
        lambda d: d.clip_fraction,
        clip_fraction,
        "updates move the policy further than the trust region",
        "a lower policy learning rate, fewer epochs or larger mini-batches a rollout",
    ),
    Rule(
        "rollout_mismatch",
        lambda d: d.rollout_mismatch,
        rollout_mismatch,
        "rollout and trainer disagree on the sampled tokens",
        "verify_weights: true to rule out the sync; the same temperature on both sides; importance_correction: {kind: token_truncate}",
    ),
    Rule(
        "first_step_kl",
        lambda d: d.first_step_kl,
        first_step_kl,
        "training does not reproduce the old log-probs that it computed itself",
        "a defect in packing, masks or dropout rather than a setting: compare attention: sdpa, and report it",
    ),
    Rule(
        "stale_weights",
        lambda d: d.stale_weights,
        stale_weights,
        "the sampler does not have the policy's present weights",
        "verify_weights: true names the tensors that did not arrive",
    ),
    Rule(
        "lambda_zero",
        lambda d: d.lambda_zero,
        lambda_zero,
        "length-adaptive lambda is 0 for responses of at most 1 / alpha tokens, which then learn from one-step advantages",
        "a larger alpha (advantages reach over alpha x length tokens), or lambda_policy: {kind: fixed}",
    ),
    Rule(
        "uniform_groups",
        lambda d: d.uniform_groups,
        uniform_groups,
        "the prompts are too easy or too hard, and group-relative advantages are zero",
        "harder prompts if all are right, easier ones or partial credit if all are wrong; dynamic sampling; larger groups",
    ),
    Rule(
        "busiest_expert",
        lambda d: d.busiest_expert,
        busiest_expert,
        "a router sends nearly all tokens to the same expert, so the others learn little and expert parallelism waits for one rank",
        "model.router: {replay: trainer, balance_coef: 1e-3}, a z-loss (z_coef), a lower policy learning rate",
    ),
    Rule(
        "grader_failures",
        lambda d: d.grader_failures,
        grader_failures,
        "a grader crashed, timed out or cannot read the ground truth",
        "see the errors in samples/; a longer reward.timeout_seconds, more reward.workers, another verifier for this data",
        pretraining=True,
    ),
    Rule(
        "missed_ends",
        lambda d: d.missed_ends,
        missed_ends,
        "the model ends its turns with a token or text at which the engine does not stop, so responses run on to the limit",
        "rollout.stop_token_ids or rollout.stop with what samples/ show at the end of an answer; the chat template that the model was "
        "trained with",
        pretraining=True,
    ),
    Rule(
        "skipped_updates",
        lambda d: d.skipped_updates,
        skipped_updates,
        "the loss or a gradient was not finite on some rank, or the loss was a spike (faults.loss_spike)",
        "a lower learning rate, model.dtype: float32 to find the source; look for outliers in advantages/max and policy/ratio_mean",
        pretraining=True,
    ),
    Rule(
        "untrained_minibatches",
        lambda d: d.untrained_minibatches,
        untrained_minibatches,
        "every response of a mini-batch was filtered",
        "a longer max_response_length if responses are truncated (truncation: mask), larger mini-batches",
        pretraining=True,
    ),
    Rule(
        "horizon_bias",
        lambda d: d.horizon_bias,
        horizon_bias,
        "the horizon is too short for this critic: its values at cuts differ from the later returns, and the policy learns this error",
        "a longer rollout.horizon.tokens, a better critic (value pretraining, critic.updates_per_rollout), a smaller lambda or alpha, or "
        "train: completed; look at critic/returns_by_cut",
    ),
)
