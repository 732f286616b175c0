"""Estimate the steps of a recipe with ``rollout.horizon`` of several lengths, against the step without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vapo_mcore.planning.planner import Plan
from vapo_mcore.planning.timing import StepTimer
from vapo_mcore.planning.waiting import Lengths, Waiting, estimate_waiting


@dataclass(frozen=True)
class HorizonStep:
    """Estimate of one step in the steady state.

    ``tokens``: sampled over all replicas; ``completed``, ``segments``: seconds of the whole step with ``train: completed`` and ``segments``
    (None without a critic). Without a horizon both are that of the plain step.
    """

    rollout: Waiting
    tokens: float
    completed: float
    segments: float | None


def compare_horizons(plan: Plan, horizons: Sequence[int], sigma: float) -> list[HorizonStep]:
    """Estimate the step without a horizon, then one for each of ``horizons``.

    Lengths are lognormal with the plan's mean before the truncation at ``max_response_length``; ``sigma``: standard deviation of the
    logarithm. The passes of training take as long as the plan says, times the tokens that go through them.
    """
    config, work = plan.subject.config, plan.work
    lengths = Lengths.lognormal(work.response_length, sigma, config.rollout.max_response_length)
    timer = StepTimer(config, plan.subject.policy, plan.subject.critic, work, plan.cluster.device)
    settings = config.rollout.horizon
    in_flight = settings.in_flight if settings is not None and settings.in_flight is not None else work.responses
    found = []
    for horizon in (None, *horizons):
        replicas = timer.replicas(plan.vllm, lengths, work.responses if horizon is None else in_flight)
        rollout = estimate_waiting(lengths, replicas, horizon)
        open_ones = replicas.count * replicas.responses
        tokens = rollout.tokens * replicas.count
        whole = tokens / lengths.mean * (work.prompt_length + lengths.mean)  # prompts and responses that end, per step
        so_far = open_ones * (work.prompt_length + rollout.before) + tokens  # prompts and open responses, cut ones included
        completed, segments = _step_seconds(plan, rollout.seconds, whole / work.tokens, so_far / work.tokens)
        found.append(HorizonStep(rollout, tokens, completed, completed if horizon is None else segments))
    return found


def _step_seconds(plan: Plan, generate: float, ended: float, open_ones: float) -> tuple[float, float | None]:
    """Return the seconds of a step with train: completed and segments.

    ``ended``, ``open_ones``: tokens of the responses that end in the step, and of all that are open in it, over those of the plan's step.
    """
    phases = plan.step.phases
    fixed = phases.get("weight_sync", 0.0) + phases.get("offload", 0.0)
    policy = phases.get("logprobs", 0.0) + phases["policy_update"]
    values, critic = phases.get("values", 0.0), phases.get("critic_update", 0.0)
    completed = generate + fixed + ended * (policy + values + critic)
    if plan.subject.critic is None:
        return completed, None
    # The policy trains on the step's tokens alone, but its passes read all tokens before them; values are those of both.
    return completed, generate + fixed + open_ones * (policy + values) + ended * (values + critic)
