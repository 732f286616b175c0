"""Declare which settings have no effect in which mode. Setting one is an error, and the resolved YAML omits them.

If a later layer switches the mode, inapplicable settings of earlier layers (extended files) are dropped silently:
``algorithm.advantage.estimator=grpo`` on the command line drops the recipe's critic settings, ``kind: fixed`` in an ablation drops the
inherited ``alpha``. A setting in the same layer as the switch, or in a later one, is a contradiction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vapo_mcore.config.engines import BUILT_IN_ENGINES
from vapo_mcore.config.layers import Fault, Key, Tree, dotted, overlap
from vapo_mcore.config.schema import GROUP_ESTIMATORS, Config, CriticParallelConfig, ParallelConfig
from vapo_mcore.config.yaml_text import shown


@dataclass(frozen=True)
class Inapplicable:
    """``keys`` have no effect if ``when(config)``; ``switches`` are the keys that decide it."""

    keys: tuple[str, ...]
    switches: tuple[str, ...]
    when: Callable[[Config], bool]
    reason: str


_ESTIMATOR = "algorithm.advantage.estimator"
_CUSTOM = "algorithm.advantage.custom"
_LAMBDA = "algorithm.advantage.lambda_policy"
_COVARIANCE = "algorithm.policy_loss.covariance"
_CORRECTION = "algorithm.policy_loss.importance_correction"


def _equal_microbatches(section: str, layout: Callable[[Config], ParallelConfig | CriticParallelConfig | None]) -> tuple[Inapplicable, ...]:
    """Return when ``equal_microbatches`` of a layout has no effect. ``layout`` returns None for a section that is not given."""

    def one_stage(config: Config) -> bool:
        given = layout(config)
        return given is not None and given.pipeline_model_parallel_size == 1

    def interleaved(config: Config) -> bool:
        given = layout(config)
        return given is not None and given.virtual_pipeline_model_parallel_size is not None

    keys, pipeline = (f"{section}.equal_microbatches",), f"{section}.pipeline_model_parallel_size"
    virtual = f"{section}.virtual_pipeline_model_parallel_size"
    return (
        Inapplicable(keys, (pipeline,), one_stage, "without pipeline parallelism ranks exchange no shapes"),
        Inapplicable(keys, (virtual,), interleaved, "interleaved stages always use micro-batches of equal size"),
    )


_WHITENED = ("gae", "reinforce_pp", "dr_grpo", "custom")
"""Estimators whose advantages can be whitened; dr_grpo's, centred in their groups, then are REINFORCE++-baseline's."""

INAPPLICABLE: tuple[Inapplicable, ...] = (
    Inapplicable(
        ("critic", "algorithm.value_loss", _LAMBDA, "algorithm.advantage.lambda_critic", "algorithm.advantage.values"),
        (_ESTIMATOR, f"{_CUSTOM}.critic"),
        lambda c: not c.uses_critic,
        "this estimator builds no critic ('gae' has one, 'custom' on request)",
    ),
    Inapplicable((_CUSTOM,), (_ESTIMATOR,), lambda c: c.algorithm.advantage.estimator != "custom", "only for 'custom'"),
    Inapplicable(
        (_LAMBDA,),
        (_ESTIMATOR,),
        lambda c: c.algorithm.advantage.estimator == "custom" and c.uses_critic,
        "a custom estimator reads its own options instead",
    ),
    Inapplicable(
        ("algorithm.advantage.gamma",),
        (_ESTIMATOR,),
        lambda c: c.algorithm.advantage.estimator not in ("gae", "reinforce_pp", "custom"),
        "this estimator does not discount (only 'gae', 'reinforce_pp' and 'custom' do)",
    ),
    Inapplicable(
        ("algorithm.advantage.whiten",),
        (_ESTIMATOR,),
        lambda c: c.algorithm.advantage.estimator not in _WHITENED and c.algorithm.advantage.whiten != "off",
        "this estimator is not whitened, only 'gae', 'reinforce_pp', 'dr_grpo' and 'custom' are (give 'off' here)",
    ),
    Inapplicable(
        ("algorithm.advantage.process",),
        (_ESTIMATOR,),
        lambda c: c.algorithm.advantage.estimator != "grpo_process",
        "only 'grpo_process' uses separate step rewards",
    ),
    Inapplicable(
        ("algorithm.advantage.truncation",),
        (_ESTIMATOR,),
        lambda c: not c.uses_critic and c.algorithm.advantage.truncation == "bootstrap",
        "'bootstrap' takes the value of the next state from a critic, which this estimator does not build",
    ),
    Inapplicable(
        ("reward.truncated_factor",),
        ("algorithm.advantage.truncation", _ESTIMATOR),
        lambda c: c.algorithm.advantage.truncation == "mask" and c.algorithm.advantage.estimator not in GROUP_ESTIMATORS,
        "a truncated response carries no loss, and this estimator does not use rewards of other responses",
    ),
    Inapplicable(
        ("reward.thinking_tags",),
        ("reward.answer_region",),
        lambda c: c.reward.answer_region == "anywhere",
        "answers count anywhere",
    ),
    Inapplicable(
        (f"{_LAMBDA}.value",), (f"{_LAMBDA}.kind",), lambda c: c.algorithm.advantage.lambda_policy.kind != "fixed", "only for 'fixed'"
    ),
    Inapplicable(
        (f"{_LAMBDA}.alpha",),
        (f"{_LAMBDA}.kind",),
        lambda c: c.algorithm.advantage.lambda_policy.kind != "length_adaptive",
        "only for 'length_adaptive'",
    ),
    Inapplicable(
        (f"{_LAMBDA}.min", f"{_LAMBDA}.max"),
        (f"{_LAMBDA}.kind",),
        lambda c: c.algorithm.advantage.lambda_policy.kind != "sigmoid",
        "only for 'sigmoid'",
    ),
    Inapplicable(
        (f"{_CORRECTION}.cap",),
        (f"{_CORRECTION}.kind",),
        lambda c: c.algorithm.policy_loss.importance_correction.kind == "off",
        "the correction is off",
    ),
    Inapplicable(
        (f"{_CORRECTION}.low",),
        (f"{_CORRECTION}.kind",),
        lambda c: not c.algorithm.policy_loss.importance_correction.kind.endswith("_mask"),
        "only for the masks",
    ),
    Inapplicable(
        ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.dual_clip"),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind == "cispo",
        "it bounds the weight only from above",
    ),
    Inapplicable(
        ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high", "algorithm.policy_loss.dual_clip"),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind == "custom",
        "a custom objective reads its own options instead",
    ),
    Inapplicable(
        ("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high", "algorithm.policy_loss.dual_clip"),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind in ("clip_cov", "kl_cov"),
        "it clips no ratio",
    ),
    Inapplicable(
        (f"{_COVARIANCE}.fraction",),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind not in ("clip_cov", "kl_cov"),
        "only for 'clip_cov' and 'kl_cov'",
    ),
    Inapplicable(
        (f"{_COVARIANCE}.low", f"{_COVARIANCE}.high"),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind != "clip_cov",
        "only for 'clip_cov'",
    ),
    Inapplicable(
        (f"{_COVARIANCE}.kl_coef",),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind != "kl_cov",
        "only for 'kl_cov'",
    ),
    Inapplicable(
        ("algorithm.policy_loss.custom",),
        ("algorithm.policy_loss.kind",),
        lambda c: c.algorithm.policy_loss.kind != "custom",
        "only for 'custom'",
    ),
    Inapplicable(
        ("algorithm.positive_lm.skip_overlong",),
        ("algorithm.positive_lm.coef",),
        lambda c: c.algorithm.positive_lm.coef == 0,
        "there is no positive-example loss",
    ),
    *_equal_microbatches("parallel", lambda c: c.parallel),
    *_equal_microbatches("critic.parallel", lambda c: c.critic.parallel),
    Inapplicable(
        ("algorithm.kl.kind", "algorithm.kl.coef", "algorithm.kl.clamp"),
        ("algorithm.kl.place",),
        lambda c: not c.uses_reference,
        "no KL term is used",
    ),
    *(
        Inapplicable(
            engine.keys,
            ("rollout.engine",),
            lambda c, name=name: c.rollout.engine in BUILT_IN_ENGINES and c.rollout.engine != name,  # type: ignore[misc]
            f"only for {name!r}",
        )
        for name, engine in BUILT_IN_ENGINES.items()
        if engine.keys
    ),
    Inapplicable(
        ("rollout.dynamic_sampling.keep", "rollout.dynamic_sampling.max_rounds", "rollout.dynamic_sampling.on_exhausted"),
        ("rollout.dynamic_sampling.enabled",),
        lambda c: not c.rollout.dynamic_sampling.enabled,
        "dynamic sampling is off",
    ),
    Inapplicable(
        ("rollout.horizon.critic",),
        ("rollout.horizon.train",),
        lambda c: c.rollout.horizon is not None and c.rollout.horizon.train == "completed",
        "policy and critic train on the same responses",
    ),
    Inapplicable(
        ("rollout.horizon.max_staleness", "rollout.horizon.stale"),
        ("rollout.horizon.train",),
        lambda c: c.rollout.trains_segments,
        "the policy trains on tokens of the step alone",
    ),
    Inapplicable(
        ("rollout.horizon.stale",),
        ("rollout.horizon.max_staleness",),
        lambda c: c.rollout.horizon is not None and c.rollout.horizon.max_staleness is None,
        "no token is too old",
    ),
    Inapplicable(
        ("critic.epochs",),
        ("critic.updates_per_rollout",),
        lambda c: c.critic.updates_per_rollout is not None,
        "updates_per_rollout sets the number of critic updates",
    ),
    Inapplicable(
        ("algorithm.self_imitation.value_coef",),
        (_ESTIMATOR,),
        lambda c: c.algorithm.self_imitation is not None and not c.uses_critic,
        "this estimator builds no critic (only 'gae' has one)",
    ),
    Inapplicable(("critic.path",), ("critic.init",), lambda c: c.critic.init == "policy", "the critic starts from the policy's weights"),
    Inapplicable(
        ("critic.head", "critic.head_init", "critic.head_bias", "critic.categorical"),
        ("critic.init",),
        lambda c: c.critic.init != "policy",
        "the head is loaded with the critic",
    ),
    Inapplicable(
        ("critic.value_pretraining.steps",),
        ("critic.value_pretraining.until",),
        lambda c: c.critic.value_pretraining.until is not None,
        "until decides the number of steps (at most max_steps)",
    ),
    Inapplicable(
        ("critic.value_pretraining.lr", "critic.value_pretraining.head_only"),
        ("critic.value_pretraining.steps",),
        lambda c: c.critic.value_pretraining.max_steps == 0,
        "there is no value pretraining",
    ),
    Inapplicable(
        ("critic.value_pretraining.until.min_rise",),
        ("critic.value_pretraining.until.patience",),
        lambda c: c.critic.value_pretraining.until is not None and c.critic.value_pretraining.until.patience is None,
        "only for patience",
    ),
    Inapplicable(
        ("critic.value_pretraining.until.window",),
        ("critic.value_pretraining.until",),
        lambda c: c.critic.value_pretraining.until is not None and not c.critic.value_pretraining.until.has_thresholds,
        "until has no threshold",
    ),
    Inapplicable(("export",), ("run.steps",), lambda c: c.run.steps == 0, "the policy is not trained; the critic is saved in any case"),
    Inapplicable(
        ("data.system_prompt",), ("data.chat_template",), lambda c: not c.data.chat_template, "a system prompt needs the chat template"
    ),
    Inapplicable(("data.chat_template_kwargs",), ("data.chat_template",), lambda c: not c.data.chat_template, "no template is used"),
    Inapplicable(("eval.top_p",), ("eval.temperature",), lambda c: bool(c.data.eval) and c.eval.temperature == 0, "decoding is greedy"),
    Inapplicable(
        ("diagnosis.explained_variance", "diagnosis.critic_stuck", "diagnosis.value_loss_rising"),
        (_ESTIMATOR, f"{_CUSTOM}.critic"),
        lambda c: not c.uses_critic,
        "there is no critic",
    ),
    Inapplicable(
        ("diagnosis.lambda_zero",),
        (_ESTIMATOR, f"{_LAMBDA}.kind"),
        lambda c: c.algorithm.advantage.estimator != "gae" or c.algorithm.advantage.lambda_policy.kind != "length_adaptive",
        "only for length-adaptive lambda",
    ),
    Inapplicable(
        ("diagnosis.uniform_groups",),
        ("batch.responses_per_prompt",),
        lambda c: c.batch.responses_per_prompt == 1,
        "a group of one always has equal verdicts",
    ),
    Inapplicable(
        ("diagnosis.first_step_kl",),
        ("rollout.old_logprobs",),
        lambda c: c.rollout.old_logprobs == "rollout",
        "the old log-probs are the rollout's, so the first step's KL is the mismatch",
    ),
    Inapplicable(
        ("run.wandb.api_key_variable",),
        ("run.wandb.mode",),
        lambda c: c.run.wandb is not None and c.run.wandb.mode == "offline",
        "offline mode contacts no server",
    ),
    Inapplicable(
        ("checkpoint.best_metric",), ("checkpoint.keep_best",), lambda c: c.checkpoint.keep_best == 0, "no best checkpoint is kept"
    ),
    Inapplicable(("eval", "export.best"), ("data.eval",), lambda c: not c.data.eval, "there is no evaluation set"),
)


NOT_INHERITED: tuple[Inapplicable, ...] = (
    Inapplicable(
        ("algorithm.advantage.whiten",),
        (_ESTIMATOR,),
        lambda c: c.algorithm.advantage.estimator == "dr_grpo",
        "whitening turns dr_grpo into REINFORCE++-baseline, so that it has to be asked for",
    ),
)
"""Settings that take effect in a mode but are not inherited into it: a layer that switches the mode drops those of earlier layers."""


def resolve_inapplicable(config: Config, tree: Tree, resets: Tree, faulty: set[str]) -> tuple[set[Key], list[Fault]]:
    """Return the keys of ``tree`` that a later switch drops, and faults for keys that contradict their mode.

    ``resets``: keys reset to their defaults by ``null``, which can also switch a mode. Entries with a switch among the ``faulty`` dotted
    keys are skipped: their mode is unknown.
    """
    given = {**tree, **resets}
    dropped: set[Key] = set()
    faults: list[Fault] = []
    reported: set[Key] = set()
    for entry in (*INAPPLICABLE, *NOT_INHERITED):
        if not entry.when(config) or any(overlap(switch, bad) for switch in entry.switches for bad in faulty):
            continue
        switch_layer = max((given[key].layer for name in entry.switches for key in _below(given, name)), default=-1)
        for name in entry.keys:
            for key in _below(tree, name):
                if tree[key].value is None or tree[key].value == {}:
                    continue  # null and {} set nothing
                if tree[key].layer < switch_layer:
                    dropped.add(key)
                elif key not in reported and entry in INAPPLICABLE:
                    reported.add(key)
                    values = {switch: _value(config, switch) for switch in entry.switches}
                    state = " and ".join(f"{switch} = {value}" for switch, value in values.items() if value is not None)
                    faults.append(Fault(dotted(key), f"{shown(tree[key].value)} has no effect with {state}: {entry.reason}; remove it"))
    return dropped, [fault for fault in faults if tuple(fault.where.split(".")) not in dropped]


def inapplicable_keys(config: Config) -> list[str]:
    """List the dotted keys and sections that have no effect in the mode of ``config``."""
    return [name for entry in INAPPLICABLE if entry.when(config) for name in entry.keys]


def _below(tree: Tree, name: str) -> list[Key]:
    prefix = tuple(name.split("."))
    return [key for key in tree if key[: len(prefix)] == prefix]


def _value(config: Config, name: str) -> str | None:
    """Format the value of a key for a message; None if a section above it is null."""
    value: object = config
    for part in name.split("."):
        if value is None:
            return None
        value = getattr(value, part)
    return shown(value) if isinstance(value, str | int | bool | tuple | type(None)) else "given"
