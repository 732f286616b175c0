"""``rollout.horizon.train: segments``: what the policy and the critic train on, against hand values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.rollouts import make_batch, make_config, make_rows
from vapo_mcore.algorithm.weights import Denominators
from vapo_mcore.config import Config
from vapo_mcore.data.packing import schedule
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.experience.batches import Experience, distribute
from vapo_mcore.experience.sampling import Round, ended_responses
from vapo_mcore.experience.token_records import merged
from vapo_mcore.megatron.losses import PolicyLoss
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer import updates
from vapo_mcore.trainer.advantages import AdvantageEstimator, imitable_rows, shaped_rewards, skipped_tokens, trainable_rows

GAMMA = 0.9
# Prompts of 2 tokens. Right, ended after 2 + 2 tokens; wrong, ended in its first segment of 1; cut after 2 + 2; cut after 2.
ENDED = make_rows([4, 1, 4, 2], [1.0, 0.0, 0.0, 0.0], segments=[((2, 1), (2, 0)), ((1, 0),), ((2, 1), (2, 0)), ((2, 0),)])
ROWS = replace(ENDED, finish_reason=["stop", "stop", "cut", "cut"])


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def configured(**advantage: Any) -> Config:
    lam = {"kind": "length_adaptive", "alpha": 0.5}
    return make_config(
        rollout={"horizon": {"tokens": 2, "train": "segments"}},
        reward={"scale": {"source": [0.0, 1.0], "target": [-1.0, 1.0]}},
        advantage={"lambda_policy": lam, "gamma": GAMMA, "whiten": "off", **advantage},
        positive_lm={"coef": 0.5},
    )


def experiences(config: Config) -> tuple[Experience, Experience]:
    """What the policy and what the critic trains on, in one process, made as the trainer makes them."""
    parallel: Any = SimpleNamespace(
        device=torch.device("cpu"),
        context_parallel_size=1,
        context_parallel_rank=0,
        tensor_model_parallel_size=1,
        data_parallel_rank=0,
    )

    def made(sampled: Round, rows: Rows, skipped: torch.Tensor | None) -> Experience:
        plan = schedule(rows.length, 4, 1, 512, seed=3, attention_cost_ratio=0.0, rows=rows.graded.nonzero().flatten())
        positive = imitable_rows(config, rows, skip_overlong=False)
        return distribute(sampled, rows, trainable_rows(config, rows), positive, plan, parallel, [0], skipped, whole_positive=True)

    sampled = Round(ROWS, torch.zeros(4, dtype=torch.int64), make_batch(ROWS), {})
    rows = replace(ROWS, reward=shaped_rewards(config, ROWS))
    ended = ended_responses(sampled)
    return made(sampled, rows, skipped_tokens(config, rows)), made(ended, rows.select([0, 1]), None)


def by_row(experience: Experience, name: str) -> list[list[float]]:
    parts = experience.batch[name].split(experience.batch.lengths.tolist())
    return [part[2:].tolist() for part in parts]


def test_the_policy_has_the_tokens_of_the_step_and_the_critic_those_of_the_ended_responses() -> None:
    policy, critic = experiences(configured())
    assert by_row(policy, "response_mask") == [[0, 0, 1, 1], [1], [0, 0, 1, 1], [1, 1]]
    assert by_row(policy, "positive_mask") == [[1, 1, 1, 1], [0], [0, 0, 0, 0], [0, 0]]
    assert [minibatch.denominators for minibatch in policy.minibatches] == [Denominators(7, 4, 4)]
    assert by_row(critic, "response_mask") == [[1, 1, 1, 1], [1]]
    assert [minibatch.denominators for minibatch in critic.minibatches] == [Denominators(5, 2, 4)]
    assert policy.rows.reward.tolist() == [1.0, -1.0, 0.0, 0.0]  # a response that was cut has none, also where a wrong one has -1
    assert torch.equal(critic.batch["tokens"], policy.batch["tokens"][: critic.batch.num_tokens])


def test_advantages_are_bootstrapped_at_the_cut_and_returns_are_those_of_whole_responses() -> None:
    config = configured()
    policy, critic = experiences(config)
    estimator = AdvantageEstimator(config, None)  # type: ignore[arg-type]
    policy.batch["values"] = torch.where(policy.mask, 0.0, math.nan)
    policy.batch["values"][policy.mask] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    policy.bootstrap_values = torch.tensor([9.0, 9.0, 0.8, -0.2])  # those of ended responses are not used
    critic.batch["values"] = torch.where(critic.mask, 0.25, math.nan)
    for experience in (policy, critic):
        estimator.place_rewards(experience)
    estimator.returns(critic)
    estimator.advantages(policy, StepMetrics(METRICS))
    found = by_row(policy, "advantages")
    lam = 1 - 1 / (0.5 * 4)  # of the length so far: 4; it is 0 for 1 and 2 tokens
    last = 1.0 - 0.2
    assert found[0] == pytest.approx([0, 0, GAMMA * 0.2 - 0.1 + GAMMA * lam * last, last])
    assert found[1] == pytest.approx([-1.0 - 0.3])
    last = GAMMA * 0.8 - 0.5
    assert found[2] == pytest.approx([0, 0, GAMMA * 0.5 - 0.4 + GAMMA * lam * last, last])
    assert found[3] == pytest.approx([GAMMA * 0.7 - 0.6, GAMMA * -0.2 - 0.7], abs=1e-6)
    assert by_row(critic, "returns")[0] == pytest.approx([GAMMA**3, GAMMA**2, GAMMA, 1.0])
    assert by_row(critic, "returns")[1] == [-1.0]


@pytest.mark.parametrize("lam", [1.0, 0.0])
def test_a_critic_of_segments_learns_its_own_value_where_a_response_was_cut(lam: float) -> None:
    config = configured(lambda_critic=lam)
    policy, _ = experiences(config)
    estimator = AdvantageEstimator(config, None)  # type: ignore[arg-type]
    policy.batch["values"] = torch.where(policy.mask, 0.0, math.nan)
    policy.batch["values"][policy.mask] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    policy.bootstrap_values = torch.tensor([9.0, 9.0, 0.8, -0.2])
    estimator.place_rewards(policy)
    estimator.returns(policy)
    found = by_row(policy, "returns")
    next_values = (0.2, 0.5, 0.7) if lam == 0.0 else (1.0, GAMMA * 0.8, GAMMA * -0.2)
    assert found[0] == pytest.approx([0, 0, GAMMA * next_values[0], 1.0])
    assert found[1] == [-1.0]
    assert found[2] == pytest.approx([0, 0, GAMMA * next_values[1], GAMMA * 0.8])
    assert found[3] == pytest.approx([GAMMA * next_values[2], GAMMA * -0.2])


@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
def test_a_truncated_response_is_followed_by_a_value_only_if_so_configured(truncation: str) -> None:
    config = configured(truncation=truncation)
    policy, _ = experiences(config)
    policy.rows = replace(policy.rows, finish_reason=["stop", "length", "cut", "cut"])
    policy.bootstrap_values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = AdvantageEstimator(config, None)._bootstrap(policy)  # type: ignore[arg-type]
    assert found is not None
    assert found.tolist() == [0.0, 2.0 if truncation == "bootstrap" else 0.0, 3.0, 4.0]
    policy.rows = replace(policy.rows, finish_reason=["stop"] * 4)
    assert (AdvantageEstimator(config, None)._bootstrap(policy) is None) == (truncation == "terminal")  # type: ignore[arg-type]


def test_the_loss_takes_the_surrogate_from_the_step_and_the_nll_from_whole_correct_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches as the update makes them: surrogate over 7 tokens of ratio 1, NLL over the 4 of the correct response."""
    config = configured()
    policy, _ = experiences(config)
    generator = torch.Generator().manual_seed(1)
    policy.batch["advantages"] = torch.where(policy.mask, torch.randn(policy.mask.numel(), generator=generator), math.nan)
    logprobs = -torch.rand(policy.mask.numel(), generator=generator) - 0.1
    policy.batch["old_logprobs"] = torch.where(policy.mask, logprobs, math.nan)
    seen: list[Any] = []

    def kept(
        _: Any, role: str, model: Any, experience: Experience, loss: Any, order: Any, weigh: Any, *more: Any, extra: tuple[str, ...]
    ) -> None:
        names = [name for name in (*loss.tensors, *extra) if name not in updates._WEIGHTS]
        seen.extend(
            (weigh(experience.with_tensors(part, names), minibatch), part.rows)
            for _, _, minibatch in order
            for part in minibatch.microbatches
        )

    monkeypatch.setattr(updates, "_update", kept)
    model: Any = SimpleNamespace(parallel=SimpleNamespace(context_parallel_group=None))
    updates.update_policy(config, model, policy, StepMetrics(METRICS), None, 1)  # type: ignore[arg-type]
    loss, total, tokens = PolicyLoss(config), torch.zeros(()), 0
    stats: dict[str, float] = {}
    starts = policy.batch.cu_seqlens.tolist()
    for microbatch, rows in seen:
        index = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows.tolist()])
        read = {name: microbatch.tensors[name] for name in loss.tensors} | {"mask": microbatch.tensors["response_mask"]}
        part, found = loss({"logprobs": logprobs[index]}, read | {"labels": microbatch.tensors["tokens"]})
        total, tokens = total + part, tokens + int(found["tokens"])
        stats = {name: stats.get(name, 0.0) + float(found[name]) for name in ("surrogate", "nll", "approx_kl")}
    surrogate = -float(policy.batch["advantages"][policy.mask].mean())
    nll = -float(logprobs[2:6].mean())
    assert tokens == 7
    assert stats["surrogate"] == pytest.approx(surrogate, rel=1e-5)
    assert stats["nll"] == pytest.approx(nll, rel=1e-5)
    assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert float(total) == pytest.approx(surrogate + 0.5 * nll, rel=1e-5)


def test_columns_of_both_experiences_are_merged_by_token() -> None:
    policy = {"text": ["a", "b"], "logprob": [None, -1.0], "value": [None, 0.5]}
    critic = {"text": ["a", "b"], "value": [0.1, 0.2], "return": [1.0, 1.0]}
    assert merged(policy, critic) == {"text": ["a", "b"], "logprob": [None, -1.0], "value": [0.1, 0.5], "return": [1.0, 1.0]}
    assert list(merged(policy, critic)) == ["text", "logprob", "value", "return"]
