"""Tokens that older policies sampled (rollout.horizon): which carry a loss, against hand values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.rollouts import make_batch, make_config, make_rows
from vapo_mcore.algorithm.weights import Denominators, token_weights
from vapo_mcore.config import Config
from vapo_mcore.data.packing import schedule
from vapo_mcore.experience.batches import Experience, distribute, leading_tokens
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.open_responses import HorizonCounts
from vapo_mcore.experience.sampling import Round
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.advantages import AdvantageEstimator, skipped_tokens, trainable_rows
from vapo_mcore.trainer.horizon_metrics import record_horizon
from vapo_mcore.trainer.step_metrics import record_mismatch

# Prompts of 2 tokens. Ages by token: 2 2 1 0 | 0 0 | 3 3 1 | 1 0 (ungraded)
SEGMENTS = [((2, 2), (1, 1), (1, 0)), ((2, 0),), ((2, 3), (1, 1)), ((1, 1), (1, 0))]
ROWS = make_rows([4, 2, 3, 2], [1.0, 0.0, 1.0, 1.0], graded=[True, True, True, False], segments=SEGMENTS, steps={0: [(1, 0.25), (2, 0.5)]})


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def configured(horizon: dict[str, Any]) -> Config:
    correction = {"importance_correction": {"kind": "token_truncate", "cap": 2.0}}
    fixed = {"lambda_policy": {"kind": "fixed", "value": 0.5}, "whiten": "off", "gamma": 0.9}
    return make_config(rollout={"horizon": {"tokens": 2, **horizon}}, policy_loss=correction, advantage=fixed)


def experience_of(config: Config) -> Experience:
    parallel: Any = SimpleNamespace(
        device=torch.device("cpu"),
        context_parallel_size=1,
        context_parallel_rank=0,
        tensor_model_parallel_size=1,
        data_parallel_rank=0,
    )
    plan = schedule(ROWS.length, 4, 1, 512, seed=3, attention_cost_ratio=0.0, rows=ROWS.graded.nonzero().flatten())
    sampled = Round(ROWS, torch.zeros(4, dtype=torch.int64), make_batch(ROWS), {})
    return distribute(
        sampled, ROWS, trainable_rows(config, ROWS), ROWS.verdict & ROWS.graded, plan, parallel, [0], skipped_tokens(config, ROWS)
    )


@pytest.mark.parametrize(
    ("horizon", "expected", "positive"),
    [
        ({}, [[1, 1, 1, 1], [1, 1], [1, 1, 1]], 7),
        ({"max_staleness": 3}, [[1, 1, 1, 1], [1, 1], [1, 1, 1]], 7),
        ({"max_staleness": 1}, [[0, 0, 1, 1], [1, 1], [0, 0, 1]], 3),
        ({"max_staleness": 0}, [[0, 0, 0, 1], [1, 1], [0, 0, 0]], 1),
        ({"max_staleness": 1, "stale": "drop"}, [[0, 0, 0, 0], [1, 1], [0, 0, 0]], 0),
        ({"max_staleness": 2, "stale": "drop"}, [[1, 1, 1, 1], [1, 1], [0, 0, 0]], 4),
    ],
)
def test_tokens_older_than_the_limit_carry_no_loss(horizon: dict[str, Any], expected: list[list[int]], positive: int) -> None:
    experience = experience_of(configured(horizon))
    found = [part.int().tolist() for part in experience.mask.split(experience.batch.lengths.tolist())]
    assert found == [[0, 0, *row] for row in expected]
    lengths = [sum(row) for row in expected]
    (minibatch,) = experience.minibatches
    assert minibatch.denominators == Denominators(sum(lengths), sum(length > 0 for length in lengths), positive)
    assert int(experience.batch["positive_mask"].sum()) == positive
    assert experience.trained_lengths.tolist() == [*lengths, 0]
    weights = token_weights(experience.mask, experience.cu_seqlens, "token", None, minibatch.denominators)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_rewards_and_advantages_of_a_partly_masked_response() -> None:
    """Row 0 keeps its last two tokens: GAE over them with lambda 0.5, gamma 0.9; the step reward on a masked token is left out, that on
    token 2 stays, and the response's reward is on the last one."""
    experience = experience_of(configured({"max_staleness": 1}))
    values = torch.full((experience.batch.num_tokens,), math.nan)
    values[experience.mask] = torch.tensor([0.3, 0.4, 0.0, 0.0, 0.1])
    experience.batch["values"] = values
    estimator = AdvantageEstimator(configured({"max_staleness": 1}), None)  # type: ignore[arg-type]
    estimator.place_rewards(experience)
    estimator.advantages(experience, StepMetrics(METRICS))
    rewards, advantages = experience.batch["rewards"], experience.batch["advantages"]
    last = 1.0 - 0.4
    assert rewards[:6].tolist() == [0, 0, 0, 0, 0.5, 1.0]
    assert advantages[:6].tolist() == pytest.approx([0, 0, 0, 0, (0.5 + 0.9 * 0.4 - 0.3) + 0.9 * 0.5 * last, last])


def test_the_correction_weighs_older_tokens_and_the_mismatch_leaves_them_out() -> None:
    config = configured({})
    experience = experience_of(config)
    ages = torch.tensor([0, 0, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 3, 3, 1])
    proximal = torch.where(experience.mask, -1.0 + 0.4 * ages, 0.0)  # rollout log-probs are -1: ratios 1, e^0.4, e^0.8, e^1.2
    experience.batch["old_logprobs"] = proximal
    metrics, estimator = StepMetrics(METRICS), AdvantageEstimator(config, None)  # type: ignore[arg-type]
    estimator.correct_importance(experience, metrics)
    found = experience.batch["importance_weights"][experience.mask].tolist()
    one, two = math.exp(0.4), 2.0  # e^0.8 and e^1.2 are above the cap of 2
    assert found == pytest.approx([two, two, one, 1, 1, 1, two, two, one])
    assert torch.equal(experience.sampled_now(), experience.mask & (ages == 0))
    record_mismatch(metrics, experience, 2.0, None, horizon=True)  # type: ignore[arg-type]
    counts = SamplingCounts(1, 2, horizon=HorizonCounts(open=9, finished=4, cut=5, waiting=0, sampled=20, reprefilled=33))
    record_horizon(metrics, experience, counts, config)
    row = metrics.reduce(None)
    assert row["mismatch/kl"] == row["mismatch/logprob_abs_max"] == 0
    assert row["mismatch/off_policy_beyond_cap_frac"] == pytest.approx(4 / 9)
    k3 = [math.exp(0.4 * age) - 1 - 0.4 * age for age in (2, 2, 1, 0, 0, 0, 3, 3, 1)]
    assert row["mismatch/off_policy_kl"] == pytest.approx(sum(k3) / 9, rel=1e-6)
    assert row["horizon/staleness_mean"] == pytest.approx((2 + 2 + 1 + 3 + 3 + 1) / 9)
    assert (row["horizon/staleness_max"], row["horizon/segments_mean"], row["horizon/segments_max"]) == (3, 2.0, 3)
    assert row["horizon/staleness_histogram"] == [3, 2, 2, 2] + [0] * 12
    assert row["horizon/segments_histogram"] == [1, 2, 1] + [0] * 13  # the ungraded response included
    assert (row["horizon/open"], row["horizon/cut"], row["tokens/reprefilled"]) == (9, 5, 33)
    assert (row["horizon/stale_tokens"], row["horizon/stale_responses"]) == (0, 0)


@pytest.mark.parametrize(("stale", "mean", "largest"), [("mask", 2 / 5, 1), ("drop", 0.0, 0)])
def test_stale_tokens_are_counted(stale: str, mean: float, largest: int) -> None:
    config = configured({"max_staleness": 1, "stale": stale})
    metrics = StepMetrics(METRICS)
    record_horizon(metrics, experience_of(config), SamplingCounts(1, 2, horizon=HorizonCounts(4, 4, 0, 0, 11, 0)), config)
    row = metrics.reduce(None)
    assert (row["horizon/stale_tokens"], row["horizon/stale_responses"]) == (4, 2)
    assert (row["horizon/staleness_mean"], row["horizon/staleness_max"]) == (pytest.approx(mean), largest)


def test_the_first_sampled_tokens_are_counted_over_observations() -> None:
    """Two responses: 2 tokens of the prompt, 2 sampled, 2 of the environment, 2 sampled; 1 and 3."""
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1]).bool()
    bounds = torch.tensor([0, 8, 12])
    for counts, expected in (((3, 1), [2, 3, 6, 9]), ((2, 0), [2, 3]), ((4, 3), [2, 3, 6, 7, 9, 10, 11]), ((0, 2), [9, 10])):
        leading = leading_tokens(mask, torch.tensor(counts), bounds)
        assert (mask & leading).nonzero()[:, 0].tolist() == expected


def test_segments_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 has 4 response tokens, but its segments are"):
        make_rows([4], [1.0], segments=[((2, 1), (1, 0))])
