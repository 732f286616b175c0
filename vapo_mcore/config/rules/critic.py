"""Rules on the critic."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule


@rule("critic.path", "critic.init", "algorithm.advantage.estimator")
def critic_init_has_a_path(s: Subject) -> str | None:
    critic = s.config.critic
    if not s.config.uses_critic or critic.init == "policy" or critic.path is not None:
        return None
    return f"is required with critic.init = {critic.init!r}: the folder to load the critic from"


@rule("critic.head_dropout", "critic.head", "critic.init", "critic.path")
def dropout_is_of_an_mlp_head(s: Subject) -> str | None:
    critic = s.config.critic
    if not s.config.uses_critic or critic.head_dropout == 0.0:
        return None
    mlp = critic.head == "mlp" if critic.init == "policy" else s.critic_architecture is None or s.critic_architecture.mlp_value_head
    return None if mlp else f"{critic.head_dropout} needs a two-layer head, but this critic's head is linear; use 0, or critic.head: mlp"


@rule("critic.categorical", "critic.init", "algorithm.advantage.estimator")
def categorical_head_has_a_range(s: Subject) -> str | None:
    critic = s.config.critic
    if not s.config.uses_critic or critic.init != "policy" or critic.categorical is None:
        return None
    low, high = critic.categorical.low, critic.categorical.high
    if not low < high:
        return f"low = {low:g} must be below high = {high:g}"
    lowest, highest = s.config.reward.interval
    if s.config.reward.overlong is not None:
        lowest -= s.config.reward.overlong.penalty
    if low <= lowest and highest <= high:
        return None
    return (
        f"[{low:g}, {high:g}] does not contain the rewards, which reach from {lowest:g} to {highest:g}; give bounds around them, such as "
        f"low: {lowest - 0.1 * (highest - lowest):g} and high: {highest + 0.1 * (highest - lowest):g}"
    )


@rule("algorithm.value_loss.clip", "critic.categorical", "critic.init", "critic.path", "algorithm.advantage.estimator")
def value_clip_is_of_a_scalar_head(s: Subject) -> str | None:
    critic = s.config.critic
    if not s.config.uses_critic or s.config.algorithm.value_loss.clip is None:
        return None
    loaded = s.critic_architecture
    categorical = critic.categorical is not None if critic.init == "policy" else loaded is not None and loaded.value_bins is not None
    return "clips the squared error of a scalar head, and this critic's is categorical; use null" if categorical else None


@rule("critic.value_pretraining.steps", "critic.init", "algorithm.advantage.estimator")
def saved_critic_says_whether_to_pretrain(s: Subject) -> str | None:
    critic = s.config.critic
    pretraining = critic.value_pretraining
    if not s.config.uses_critic or critic.init != "saved" or pretraining.until is not None or s.given("critic.value_pretraining.steps"):
        return None
    return f"defaults to {pretraining.steps}, but critic.init = 'saved' loads a trained critic; set 0, or the number of further steps"


@rule("run.steps", "critic.value_pretraining.steps", "algorithm.advantage.estimator")
def no_steps_is_value_pretraining(s: Subject) -> str | None:
    if s.config.run.steps > 0 or (s.config.uses_critic and s.config.critic.value_pretraining.max_steps > 0):
        return None
    return "0 leaves nothing to do, since this recipe has no value pretraining either; set at least 1"


@rule("critic.value_pretraining.until")
def until_has_a_threshold(s: Subject) -> str | None:
    until = s.config.critic.value_pretraining.until
    if until is None:
        return None
    given = (until.value_loss_below, until.explained_variance_above, until.probe_explained_variance_above, until.patience)
    if any(criterion is not None for criterion in given):
        return None
    return (
        "needs value_loss_below, explained_variance_above, probe_explained_variance_above or patience; without any of them, set steps "
        "instead of until"
    )


@rule("critic.value_pretraining.until", "critic.probe", "algorithm.advantage.estimator")
def until_with_a_probe_has_one(s: Subject) -> str | None:
    until = s.config.critic.value_pretraining.until
    if until is None or s.config.critic.probe is not None or not s.config.uses_critic:
        return None
    given = [name for name in ("probe_explained_variance_above", "patience") if getattr(until, name) is not None]
    return f"{' and '.join(given)} read the explained variance of critic.probe, which is null; set critic.probe: {{}}" if given else None


@rule("critic.probe", "data.eval", "algorithm.advantage.estimator")
def probe_has_held_out_prompts(s: Subject) -> str | None:
    if not s.config.uses_critic or s.config.critic.probe is None or s.config.data.eval:
        return None
    return "takes its prompts from data.eval, which is empty; add held-out prompts there"


@rule("critic.value_pretraining.until.window", "critic.value_pretraining.until.max_steps")
def until_window_fits(s: Subject) -> str | None:
    until = s.config.critic.value_pretraining.until
    if until is None or not until.has_thresholds or until.window <= until.max_steps:
        return None
    return f"{until.window} consecutive steps do not fit in max_steps = {until.max_steps}; lower window or raise max_steps"
