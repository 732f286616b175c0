"""Rules on the routers of mixtures of experts."""

from __future__ import annotations

from vapo_mcore.config.engines import BUILT_IN_ENGINES
from vapo_mcore.config.rules.base import Subject, rule
from vapo_mcore.config.schema.diagnosis import BusiestExpertRule


@rule("model.router", "diagnosis.busiest_expert", "model.path", "critic.path")
def router_settings_need_a_mixture(s: Subject) -> str | None:
    router = s.config.model.router
    values = {"replay": router.replay, "balance_coef": router.balance_coef, "z_coef": router.z_coef}
    given = [f"{name} = {value}" for name, value in values.items() if value not in ("off", 0.0)]
    if s.config.diagnosis.busiest_expert not in (None, BusiestExpertRule()):  # a resolved configuration gives the defaults
        given.append("diagnosis.busiest_expert")
    if s.mixtures or not given:
        return None
    return f"{' and '.join(given)}: of routers, but the models are dense and have none; remove"


@rule("model.router.replay", "rollout.old_logprobs", "model.path")
def router_replay_needs_the_log_prob_pass(s: Subject) -> str | None:
    assert s.architecture is not None
    if s.config.model.router.replay != "trainer" or s.config.rollout.old_logprobs == "recompute" or not s.architecture.is_moe:
        return None
    return (
        "'trainer' repeats the experts that the policy's log-prob pass chose, but rollout.old_logprobs = 'rollout' omits that pass; use "
        "rollout.old_logprobs: recompute, or replay: off"
    )


@rule("model.router.replay", "rollout.engine", "model.path")
def engine_replay_needs_an_engine_that_returns_experts(s: Subject) -> str | None:
    name = s.config.rollout.engine
    if s.config.model.router.replay != "engine" or name not in BUILT_IN_ENGINES or BUILT_IN_ENGINES[name].traits.returns_experts:
        return None
    able = " or ".join(other for other, engine in BUILT_IN_ENGINES.items() if engine.traits.returns_experts)
    return (
        f"'engine' repeats the experts that the rollout engine chose, but rollout.engine = '{name}' does not return them; use {able}, or "
        "replay: trainer"
    )


@rule("model.router.replay", "model.path", "critic.path")
def engine_replay_needs_a_mixture_as_policy(s: Subject) -> str | None:
    assert s.architecture is not None
    if s.config.model.router.replay != "engine" or s.architecture.is_moe or not s.mixtures:
        return None
    return (
        "'engine' repeats the experts that the rollout engine chose with the policy's weights, but model.path is dense and only the "
        "critic is a mixture; use replay: trainer, which repeats those of the critic's value pass"
    )


@rule("model.router.replay", "rollout.horizon")
def engine_replay_needs_whole_responses(s: Subject) -> str | None:
    if s.config.model.router.replay != "engine" or s.config.rollout.horizon is None:
        return None
    return (
        "'engine' cannot be combined with rollout.horizon: earlier segments of a response were sampled with older weights, and the choices "
        "that made their keys and values are lost when the engine prefills them with new ones; use replay: trainer, or remove the horizon"
    )


@rule("model.router.balance_coef", "model.router.replay", "rollout.old_logprobs")
def balance_loss_needs_router_replay(s: Subject) -> str | None:
    router = s.config.model.router
    if (
        router.balance_coef == 0
        or router.replay == "trainer"
        or (router.replay == "engine" and s.config.rollout.old_logprobs == "recompute")
    ):
        return None
    if router.replay == "engine":
        return (
            f"{router.balance_coef:g} weighs each expert by its share of the mini-batch's tokens, which must be known before its first "
            "micro-batch, but the engine has no choice of a response's last token, and rollout.old_logprobs = 'rollout' omits the pass "
            "that makes it; use rollout.old_logprobs: recompute"
        )
    return (
        f"{router.balance_coef:g} weighs each expert by its share of the mini-batch's tokens, which must be known before its first "
        "micro-batch: only model.router.replay fixes the choices before the update; set it to 'trainer' (a share per micro-batch would "
        "make the loss depend on the packing)"
    )
