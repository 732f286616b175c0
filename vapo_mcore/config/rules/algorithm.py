"""Rules on advantages and losses."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule
from vapo_mcore.config.schema import GROUP_ESTIMATORS


@rule("batch.responses_per_prompt", "algorithm.advantage.estimator")
def group_estimators_need_groups(s: Subject) -> str | None:
    estimator, size = s.config.algorithm.advantage.estimator, s.config.batch.responses_per_prompt
    if estimator not in GROUP_ESTIMATORS or size > 1:
        return None
    return (
        f"1 makes every advantage of algorithm.advantage.estimator = {estimator!r} zero (a group of one); "
        "use at least 2, or another estimator"
    )


@rule("algorithm.advantage.custom", "algorithm.advantage.estimator")
def custom_estimator_is_named(s: Subject) -> str | None:
    advantage = s.config.algorithm.advantage
    if advantage.estimator != "custom" or advantage.custom is not None:
        return None
    return "is required with algorithm.advantage.estimator = 'custom': {function: path/to/file.py:name}"


@rule("algorithm.advantage.clip")
def advantage_clip_is_an_interval(s: Subject) -> str | None:
    clip = s.config.algorithm.advantage.clip
    if clip is None or clip[0] < 0 < clip[1]:
        return None
    return f"[{clip[0]}, {clip[1]}] must go from below 0 to above 0: advantages have both signs"


@rule("algorithm.policy_loss.custom", "algorithm.policy_loss.kind")
def custom_loss_is_named(s: Subject) -> str | None:
    loss = s.config.algorithm.policy_loss
    if loss.kind != "custom" or loss.custom is not None:
        return None
    return "is required with algorithm.policy_loss.kind = 'custom': {function: path/to/file.py:name}"


@rule("algorithm.policy_loss.covariance.low", "algorithm.policy_loss.covariance.high")
def covariances_have_a_range(s: Subject) -> str | None:
    loss = s.config.algorithm.policy_loss
    if loss.kind != "clip_cov" or loss.covariance.low < loss.covariance.high:
        return None
    return f"{loss.covariance.low} must be below high = {loss.covariance.high}: clip_cov draws tokens between them"


@rule("algorithm.loss_terms")
def loss_terms_have_distinct_names(s: Subject) -> str | None:
    names = [term.name for term in s.config.algorithm.loss_terms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"several terms are named {', '.join(map(repr, repeated))}; metrics use the names, so make them distinct" if repeated else None


@rule("algorithm.advantage.lambda_policy.alpha", "algorithm.advantage.lambda_policy.kind", "rollout.max_response_length")
def length_adaptive_lambda_rises_above_zero(s: Subject) -> str | None:
    lam, longest = s.config.algorithm.advantage.lambda_policy, s.config.rollout.max_response_length
    if not s.config.uses_critic or lam.kind != "length_adaptive" or lam.alpha * longest > 1:
        return None
    return (
        f"{lam.alpha} gives every response lambda = 0: lambda = 1 - 1/(alpha l) is 0 up to l = 1/alpha = {1 / lam.alpha:.0f} tokens, "
        f"but rollout.max_response_length = {longest}; raise alpha, or use kind: fixed"
    )


@rule("algorithm.advantage.lambda_policy.min", "algorithm.advantage.lambda_policy.max", "algorithm.advantage.lambda_policy.kind")
def sigmoid_lambda_has_a_range(s: Subject) -> str | None:
    lam = s.config.algorithm.advantage.lambda_policy
    if lam.kind != "sigmoid" or lam.min < lam.max:
        return None
    return f"{lam.min} must be below max = {lam.max}"


@rule("algorithm.policy_loss.importance_correction.kind", "rollout.old_logprobs")
def importance_correction_needs_recomputed_logprobs(s: Subject) -> str | None:
    kind = s.config.algorithm.policy_loss.importance_correction.kind
    if kind == "off" or s.config.rollout.old_logprobs == "recompute":
        return None
    return (
        f"{kind!r} compares the trainer's old log-probs with the rollout's, but rollout.old_logprobs = 'rollout' makes them "
        "the same; use 'recompute'"
    )


@rule("algorithm.policy_loss.importance_correction.low", "algorithm.policy_loss.importance_correction.cap")
def importance_mask_has_a_range(s: Subject) -> str | None:
    correction = s.config.algorithm.policy_loss.importance_correction
    if not correction.kind.endswith("_mask") or correction.low < correction.cap:
        return None
    return f"{correction.low} must be below cap = {correction.cap}: tokens whose ratio is outside [low, cap] are masked"


@rule("algorithm.kl.kind", "algorithm.kl.place")
def kl_loss_has_a_gradient(s: Subject) -> str | None:
    kl = s.config.algorithm.kl
    if kl.place != "loss" or kl.kind != "k1":
        return None
    return "'k1' in the loss has an expected gradient of zero; use 'k2' or 'k3' there, or place: reward"


@rule("algorithm.kl.place", "algorithm.advantage.estimator")
def kl_in_the_reward_reaches_the_advantages(s: Subject) -> str | None:
    estimator = s.config.algorithm.advantage.estimator
    if s.config.algorithm.kl.place != "reward" or estimator not in GROUP_ESTIMATORS or estimator == "rloo":
        return None
    return (
        f"'reward' has no effect with algorithm.advantage.estimator = {estimator!r}, which uses one reward per response and ignores token "
        "rewards; use place: loss, or an estimator that reads them ('gae', 'rloo', 'reinforce', 'reinforce_pp')"
    )


@rule("algorithm.kl.coef", "algorithm.kl.place")
def kl_has_a_coefficient(s: Subject) -> str | None:
    kl = s.config.algorithm.kl
    if kl.place == "off" or kl.coef > 0:
        return None
    return (
        f"0 with algorithm.kl.place = {kl.place!r} would load a reference model without using it; "
        "set a coefficient (DeepSeekMath: 0.04) or place: off"
    )
