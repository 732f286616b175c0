"""Which responses are remembered, what a draw looks like to the engine, and when steps are due."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.trainer.rollouts import make_config, make_experience, make_rows
from vapo_mcore.data.microbatch import make_microbatch
from vapo_mcore.trainer.advantages import AdvantageEstimator
from vapo_mcore.trainer.self_imitation import SelfImitation, best_rows, replay_batch
from vapo_mcore.trainer.updates import update_order

PARALLEL: Any = SimpleNamespace(data_parallel_group=None)


def remembered(rows: Any, **settings: Any) -> SelfImitation:
    config = make_config(self_imitation={"capacity": 8, **settings}, advantage={"gamma": 0.5})
    experience = make_experience(config, rows)
    AdvantageEstimator(config, PARALLEL.data_parallel_group).place_rewards(experience)
    imitation = SelfImitation(config, PARALLEL)
    imitation.remember(experience, 1, pretraining=False)
    return imitation


def test_the_best_correct_responses_of_each_group_are_chosen() -> None:
    rows = make_rows([2, 2, 2, 0, 2, 2], [0.5, 1.0, 1.0, 1.0, 0.25, -1.0], groups=[0, 0, 0, 1, 1, 1], graded=[True] * 5 + [False])
    everything = torch.ones(6, dtype=torch.bool)
    assert best_rows(rows, everything, 1).tolist() == [1, 4]  # the first of equals; an empty response is none
    assert best_rows(rows, everything, 2).tolist() == [1, 2, 4]
    everything[1] = False  # carries no loss
    assert best_rows(rows, everything, 1).tolist() == [2, 4]
    assert best_rows(make_rows([1], [0.0]), torch.ones(1, dtype=torch.bool), 1).tolist() == []


def test_a_truncated_correct_response_is_remembered_unless_overlong_ones_are_skipped() -> None:
    rows = make_rows([2, 3], [1.0, 1.0], groups=[0, 1], cut=[1])
    assert remembered(rows).state_dict()["prompt_ids"] == ["set/0", "set/1"]
    assert remembered(rows, skip_overlong=True).state_dict()["prompt_ids"] == ["set/0"]


def test_remembered_with_tokens_returns_and_without_the_pass_of_the_data() -> None:
    imitation = remembered(make_rows([2, 3, 2], [0.0, 1.0, 1.0], groups=[0, 0, 1], steps={1: [(0, 4.0)]}))
    state = imitation.state_dict()
    assert state["prompt_ids"] == ["set/0", "set/1"]
    assert state["tokens"].tolist() == [100, 101, 102, 103, 104, 200, 201, 202, 203]
    assert state["response_mask"].tolist() == [False, False, True, True, True, False, False, True, True]
    assert state["returns"].tolist() == [0, 0, 4.25, 0.5, 1.0, 0, 0, 0.5, 1.0]  # discounted by 0.5 a token
    assert state["rewards"].tolist() == [5.0, 1.0]


def test_value_pretraining_fills_a_frozen_buffer_alone() -> None:
    config = make_config(self_imitation={})
    experience = make_experience(config, make_rows([2], [1.0]))
    AdvantageEstimator(config, PARALLEL.data_parallel_group).place_rewards(experience)
    for keep, expected in (("top_reward", 0), ("fifo", 0), ("frozen", 1)):
        imitation = SelfImitation(make_config(self_imitation={"keep": keep}), PARALLEL)
        imitation.remember(experience, 1, pretraining=True)
        imitation.end_of_pretraining()
        assert len(imitation.buffer) == expected
        assert imitation.buffer.is_frozen == (keep == "frozen")
        imitation.remember(make_experience_again(config), 2, pretraining=False)
        assert len(imitation.buffer) == 1


def make_experience_again(config: Any) -> Any:
    experience = make_experience(config, make_rows([3], [1.0]))
    AdvantageEstimator(config, PARALLEL.data_parallel_group).place_rewards(experience)
    return experience


def test_draws_are_seeded_by_the_rollout_and_due_every_few_steps() -> None:
    imitation = remembered(make_rows([1] * 8, [1.0] * 8), every_steps=2, batch_size=3)
    assert imitation.draw(1, 5) is None
    first, again, other = imitation.draw(2, 6), imitation.draw(2, 6), imitation.draw(4, 8)
    assert first is not None and again is not None and other is not None
    assert first.prompt_ids == again.prompt_ids != other.prompt_ids
    assert len(first.prompt_ids) == 3
    empty = SelfImitation(make_config(self_imitation={}), PARALLEL)
    assert empty.draw(1, 1) is None


def test_a_draw_is_a_rollout_batch_for_the_engine() -> None:
    imitation = remembered(make_rows([2, 3], [1.0, 1.0]))
    sample = imitation.draw(1, 1)
    assert sample is not None
    batch = replay_batch(sample)
    assert batch.rows.prompt_length.tolist() == [2, 2]
    assert sorted(batch.rows.response_length.tolist()) == [2, 3]
    pack = make_microbatch(batch, [1, 0])
    assert pack.tensors["returns"].numel() == 9
    assert all(math.isfinite(x) for x in pack.tensors["returns"].tolist())


@pytest.mark.parametrize(
    ("epochs", "updates", "expected"), [(1, None, [0, 1, 2]), (2, None, [0, 1, 2, 0, 1, 2]), (1, 2, [0, 2]), (1, 5, [0, 2, 0, 2, 0])]
)
def test_passes_over_the_minibatches_or_a_number_of_updates(epochs: int, updates: int | None, expected: list[int]) -> None:
    minibatches: list[Any] = [SimpleNamespace(number=n, is_masked=n == 1) for n in range(3)]
    order = update_order(minibatches, epochs, updates)
    assert [number for _, number, _ in order] == [minibatch.number for _, _, minibatch in order] == expected  # type: ignore[attr-defined]
    assert update_order(minibatches[1:2], 1, 3) == []
