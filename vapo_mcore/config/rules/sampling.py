"""Rules on sampling and rewards."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule

_TRUNCATES_THE_DISTRIBUTION = "truncates the distribution that training samples from, so the trainer's log-probs would be biased"


@rule("rollout.top_p")
def training_samples_the_whole_distribution(s: Subject) -> str | None:
    top_p = s.config.rollout.top_p
    if top_p == 1.0:
        return None
    return f"{top_p} {_TRUNCATES_THE_DISTRIBUTION}; use 1.0 (eval.top_p may differ)"


@rule("rollout.top_k")
def training_samples_all_tokens(s: Subject) -> str | None:
    top_k = s.config.rollout.top_k
    if top_k == -1:
        return None
    return f"{top_k} {_TRUNCATES_THE_DISTRIBUTION}; use -1"


@rule("rollout.environment.format")
def observation_format_has_one_place(s: Subject) -> str | None:
    environment = s.config.rollout.environment
    if environment is None or environment.format is None or environment.format.count("{observation}") == 1:
        return None
    return f"{environment.format!r} must contain {{observation}} exactly once; the environment's text replaces it"


@rule("rollout.dynamic_sampling.enabled", "batch.responses_per_prompt")
def dynamic_sampling_needs_groups(s: Subject) -> str | None:
    if s.config.rollout.dynamic_sampling.enabled and s.config.batch.responses_per_prompt == 1:
        return "true drops groups with equal verdicts, which includes every group of batch.responses_per_prompt = 1; use at least 2"
    return None


@rule("reward.scale.source")
def reward_scale_has_a_source_interval(s: Subject) -> str | None:
    scale = s.config.reward.scale
    if scale is None or scale.source[0] < scale.source[1]:
        return None
    return f"{list(scale.source)} must be an interval [low, high] with low < high"


@rule("reward.scale.target")
def reward_scale_rewards_what_is_right(s: Subject) -> str | None:
    scale = s.config.reward.scale
    if scale is None or scale.target[0] < scale.target[1]:
        return None
    return f"{list(scale.target)} must be an interval [low, high] with low < high, so that right answers earn more than wrong ones"


@rule("reward.overlong.cache", "rollout.max_response_length")
def overlong_cache_is_inside_the_response(s: Subject) -> str | None:
    overlong, longest = s.config.reward.overlong, s.config.rollout.max_response_length
    if overlong is None or overlong.cache < longest:
        return None
    return f"{overlong.cache} must be below rollout.max_response_length = {longest}: the penalty starts at their difference"
