"""Steps with a horizon as ``plan`` estimates them: the step without one is the plan's, and what each mode of training costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vapo_mcore.config import load_config
from vapo_mcore.config.architecture import new_critic
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.planning.devices import choose_device
from vapo_mcore.planning.horizons import compare_horizons
from vapo_mcore.planning.planner import Cluster, Plan, Planner, Subject

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "qwen2.5_7b_vapo.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = load_config(RECIPE, [], check_paths=False)
    policy = find_architecture("qwen2.5-7b")
    cluster = Cluster.of(config.parallel.world_size, 8, choose_device("h100", []))
    return Planner().plan(Subject(config, policy, new_critic(config, policy), 3000), cluster, build=False)


def test_a_horizon_as_long_as_the_responses_is_the_step_without_one(plan: Plan) -> None:
    longest = plan.subject.config.rollout.max_response_length
    plain, long, half = compare_horizons(plan, [longest, longest // 2], 1.0)
    assert plain.rollout == replace(long.rollout, horizon=None) and plain.completed == long.completed
    assert plain.segments == plain.completed
    phases = plan.step.phases
    passes = sum(phases[name] for name in ("logprobs", "policy_update", "values", "critic_update"))
    share = plain.tokens + plan.work.responses * plan.work.prompt_length  # the mean after the truncation is below the plan's
    rest = phases["weight_sync"] + phases.get("offload", 0.0)
    assert plain.completed == pytest.approx(plain.rollout.seconds + rest + passes * share / plan.work.tokens, rel=1e-6)
    assert long.segments == pytest.approx(long.completed + phases["values"] * share / plan.work.tokens, rel=1e-6)  # values of both parts
    assert half.rollout.empty < plain.rollout.empty and half.tokens < plain.tokens


def test_segments_pass_over_earlier_tokens_again(plan: Plan) -> None:
    _, long, short = compare_horizons(plan, [4096, 512], 1.0)
    assert short.segments is not None and long.segments is not None
    passes = {step.rollout.horizon: (step.segments or 0.0) - step.completed for step in (long, short)}
    assert passes[512] > 2 * passes[4096] > 0
    assert short.rollout.prefill > 4 * long.rollout.prefill
    assert (short.segments / short.tokens) > (long.segments / long.tokens)


def test_more_in_flight_fill_the_slots(plan: Plan) -> None:
    wide = load_config(
        RECIPE,
        [
            f"rollout.horizon={{tokens: 1024, in_flight: {4 * plan.work.responses}}}",
            "algorithm.policy_loss.importance_correction={kind: token_truncate}",
        ],
        check_paths=False,
    )
    more = replace(plan, subject=replace(plan.subject, config=wide))
    (_, one), (_, four) = compare_horizons(plan, [1024], 1.0), compare_horizons(more, [1024], 1.0)
    assert four.tokens == pytest.approx(4 * one.tokens, rel=0.02)
    assert four.rollout.tokens_per_second > one.rollout.tokens_per_second
