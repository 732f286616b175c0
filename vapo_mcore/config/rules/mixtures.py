"""Rules on the routers of mixtures of experts."""

from __future__ import annotations

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
    if s.config.model.router.replay == "off" or s.config.rollout.old_logprobs == "recompute" or not s.architecture.is_moe:
        return None
    return (
        "'trainer' repeats the experts that the policy's log-prob pass chose, but rollout.old_logprobs = 'rollout' omits that pass; use "
        "rollout.old_logprobs: recompute, or replay: off"
    )


@rule("model.router.balance_coef", "model.router.replay")
def balance_loss_needs_router_replay(s: Subject) -> str | None:
    router = s.config.model.router
    if router.balance_coef == 0 or router.replay != "off":
        return None
    return (
        f"{router.balance_coef:g} weighs each expert by its share of the mini-batch's tokens, which must be known before its first "
        "micro-batch: only model.router.replay = 'trainer' fixes the choices before the update; set it (a share per micro-batch would make "
        "the loss depend on the packing)"
    )
