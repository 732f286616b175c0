"""Rules on rollouts with a fixed horizon."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule
from vapo_mcore.config.schema import GROUP_ESTIMATORS


@rule("rollout.horizon.in_flight", "batch.prompts_per_step", "batch.responses_per_prompt")
def in_flight_holds_a_step(s: Subject) -> str | None:
    horizon, batch = s.config.rollout.horizon, s.config.batch
    if horizon is None or horizon.in_flight is None:
        return None
    step, size = batch.responses_per_step, batch.responses_per_prompt
    if horizon.in_flight < step:
        return (
            f"{horizon.in_flight} open responses are fewer than those of a step, batch.prompts_per_step x batch.responses_per_prompt = "
            f"{batch.prompts_per_step} x {size} = {step}; use at least {step}, or a smaller batch"
        )
    if horizon.in_flight % size:
        return (
            f"{horizon.in_flight} is not a multiple of batch.responses_per_prompt = {size}: a new prompt opens {size} responses at once; "
            f"use {horizon.in_flight // size * size} or {-(-horizon.in_flight // size) * size}"
        )
    return None


@rule("rollout.horizon.max_segments", "rollout.horizon.tokens", "rollout.max_response_length")
def segment_limit_is_reached(s: Subject) -> str | None:
    horizon, longest = s.config.rollout.horizon, s.config.rollout.max_response_length
    if horizon is None or horizon.max_segments is None or horizon.max_segments * horizon.tokens < longest:
        return None
    segments = -(-longest // horizon.tokens)
    return (
        f"{horizon.max_segments} has no effect: with rollout.horizon.tokens = {horizon.tokens} the longest response, "
        f"rollout.max_response_length = {longest}, has {segments} segments and the last one is never cut; "
        f"{f'use at most {segments - 1}, or ' if segments > 1 else ''}remove it"
    )


@rule("rollout.horizon.max_staleness", "rollout.horizon.tokens", "rollout.max_response_length", "algorithm.advantage.estimator")
def some_tokens_are_too_old(s: Subject) -> str | None:
    horizon, estimator = s.config.rollout.horizon, s.config.algorithm.advantage.estimator
    if horizon is None or horizon.max_staleness is None or s.config.rollout.trains_segments:
        return None
    if estimator in (*GROUP_ESTIMATORS, "custom"):  # a response may wait for its group for any number of steps
        return None
    longest = s.config.rollout.max_response_length
    segments = min(-(-longest // horizon.tokens), horizon.max_segments or longest)
    if horizon.max_staleness < segments - 1:
        return None
    advice = f"use at most {segments - 2}, or remove it" if segments > 1 else "remove it"
    return (
        f"{horizon.max_staleness} has no effect: a response has at most {segments} segments (rollout.horizon.tokens = {horizon.tokens}, "
        f"rollout.max_response_length = {longest}, rollout.horizon.max_segments = {horizon.max_segments or 'null'}) and trains with the "
        f"last, so its oldest tokens are {segments - 1} steps old; {advice}"
    )


@rule("rollout.horizon", "rollout.dynamic_sampling.enabled")
def horizon_draws_no_groups_again(s: Subject) -> str | None:
    if s.config.rollout.horizon is None or not s.config.rollout.dynamic_sampling.enabled:
        return None
    return (
        "cannot be combined with rollout.dynamic_sampling.enabled = true: a group can be dropped only when all its responses have ended, "
        "steps after it was drawn, so further draws cannot fill the step; remove one of them"
    )


@rule("rollout.horizon", "rollout.old_logprobs")
def horizon_recomputes_logprobs(s: Subject) -> str | None:
    rollout = s.config.rollout
    if rollout.horizon is None or rollout.trains_segments or rollout.old_logprobs == "recompute":
        return None
    return (
        "needs rollout.old_logprobs = 'recompute': tokens of earlier steps have two log-probs, that of the policy that sampled them and "
        "that of the present policy, around which the update is clipped; 'rollout' would use the first for both"
    )


@rule("rollout.horizon", "algorithm.policy_loss.importance_correction.kind", "rollout.old_logprobs")
def horizon_corrects_older_tokens(s: Subject) -> str | None:
    rollout, kind = s.config.rollout, s.config.algorithm.policy_loss.importance_correction.kind
    if rollout.horizon is None or rollout.trains_segments or kind != "off" or rollout.old_logprobs != "recompute":
        return None
    return (
        "needs algorithm.policy_loss.importance_correction.kind other than 'off': tokens of earlier steps were sampled by older policies, "
        "and only the correction weights them by the ratio of the present policy's probability to theirs; use 'token_truncate', or a mask"
    )


@rule("rollout.horizon.train", "algorithm.advantage.estimator")
def segments_have_a_critic(s: Subject) -> str | None:
    estimator = s.config.algorithm.advantage.estimator
    if not s.config.rollout.trains_segments or estimator == "gae":
        return None
    if estimator in GROUP_ESTIMATORS:
        reason = "compares the rewards of a prompt's responses, but a response that was cut has no reward yet"
    elif estimator == "custom":
        reason = "does not receive where a response was cut, nor the critic's value there"
    else:
        reason = "has no critic, whose value replaces the rest of a response that was cut"
    return f"'segments' cannot be used with algorithm.advantage.estimator = {estimator!r}, which {reason}; use 'completed', or 'gae'"


@rule("rollout.horizon.train", "algorithm.advantage.truncation")
def segments_train_before_a_truncation(s: Subject) -> str | None:
    if not s.config.rollout.trains_segments or s.config.algorithm.advantage.truncation != "mask":
        return None
    return (
        "'segments' cannot be used with algorithm.advantage.truncation = 'mask': when a response is truncated, its earlier segments have "
        "trained already; use 'terminal' or 'bootstrap', or train: completed"
    )


@rule("rollout.horizon.train", "algorithm.kl.place")
def segments_have_no_kl_in_the_reward(s: Subject) -> str | None:
    if not s.config.rollout.trains_segments or s.config.algorithm.kl.place != "reward":
        return None
    return (
        "'segments' cannot be used with algorithm.kl.place = 'reward': the critic's returns cover all tokens of a response, but the "
        "penalty of its earlier segments belongs to earlier policies; use place: loss, or train: completed"
    )


@rule("rollout.horizon.train", "algorithm.policy_loss.kind", "algorithm.loss_terms")
def segments_are_no_responses(s: Subject) -> str | None:
    algorithm = s.config.algorithm
    if not s.config.rollout.trains_segments:
        return None
    loss = algorithm.policy_loss
    if loss.sequence_level:
        return (
            f"'segments' cannot be used with algorithm.policy_loss.kind = {loss.kind!r}, whose ratio is that of the whole response, while "
            "a step trains on a part of it; use another kind, or train: completed"
        )
    if loss.kind == "custom" or algorithm.loss_terms:
        return (
            "'segments' cannot be used with functions of your own in the policy's loss (algorithm.policy_loss.custom, "
            "algorithm.loss_terms): they may read a verdict or a length that a response that was cut does not have yet; use "
            "train: completed"
        )
    return None


@rule("rollout.horizon.critic", "algorithm.self_imitation")
def imitation_keeps_whole_responses(s: Subject) -> str | None:
    horizon = s.config.rollout.horizon
    if horizon is None or horizon.critic == "ended" or s.config.algorithm.self_imitation is None:
        return None
    return (
        "'segments' cannot be used with algorithm.self_imitation, which keeps whole responses with the critic's targets for all their "
        "tokens; use 'ended'"
    )


@rule("rollout.horizon", "critic.head_bias", "critic.init", "critic.value_pretraining")
def horizon_leaves_a_mean_return(s: Subject) -> str | None:
    c = s.config
    if c.rollout.horizon is None or not c.uses_critic or c.critic.init != "policy" or c.critic.head_bias != "mean_return":
        return None
    if c.critic.value_pretraining.max_steps > 0:
        return None
    return (
        "cannot set critic.head_bias = 'mean_return' without value pretraining: the first step has only responses of at most "
        "rollout.horizon.tokens tokens, or none, and their mean return is not that of all responses; give "
        "critic.value_pretraining.steps, or use head_bias: zero"
    )
