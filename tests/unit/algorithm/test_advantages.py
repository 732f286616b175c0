"""Group-relative, process-supervised and REINFORCE advantages, and whitening, against hand computation and plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vapo_mcore.algorithm.advantages import (
    group_advantages,
    normalised_step_rewards,
    reward_to_go,
    rewards_of_own_and_later_steps,
    whiten,
)
from vapo_mcore.algorithm.segments import broadcast_to_tokens


def assert_close(got: Tensor, expected: list[float], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def group_oracle(scores: list[float], groups: list[int], valid: list[bool], kind: str) -> list[float]:
    result = []
    for score, group, here in zip(scores, groups, valid, strict=True):
        members = [s for s, g, v in zip(scores, groups, valid, strict=True) if g == group and v]
        if not here or len(members) < 2:
            result.append(0.0)
        elif kind == "rloo":
            result.append(score - (math.fsum(members) - score) / (len(members) - 1))
        else:
            centred = score - math.fsum(members) / len(members)
            result.append(centred / (statistics.pstdev(members) + 1e-6) if kind == "grpo" else centred)
    return result


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 2, width=32), st.integers(-1, 3), st.booleans()), max_size=20))
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_agree_with_plain_python(kind: str, rows: list[tuple[float, int, bool]]) -> None:
    scores, groups, valid = ([row[i] for row in rows] for i in range(3))
    given_scores = torch.tensor([s if v else math.nan for s, v in zip(scores, valid, strict=True)], dtype=torch.float64)
    got = group_advantages(given_scores, torch.tensor(groups, dtype=torch.int64), kind, torch.tensor(valid, dtype=torch.bool))
    assert_close(got, group_oracle(scores, groups, valid, kind), 1e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_and_a_group_with_one_graded_response_give_zero(kind: str) -> None:
    scores = torch.tensor([3.0, 1.0, math.nan, 5.0])
    got = group_advantages(scores, torch.tensor([7, 8, 8, 9]), kind, torch.tensor([True, True, False, True]))
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_failed_grading_does_not_shift_the_others() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, math.inf]), torch.zeros(4, dtype=torch.int64)
    valid = torch.tensor([True, True, True, False])
    assert_close(group_advantages(scores, groups, "dr_grpo", valid), [2 / 3, -1 / 3, -1 / 3, 0])
    assert_close(group_advantages(scores, groups, "rloo", valid), [1, -0.5, -0.5, 0])


def test_uniform_groups_of_an_inexact_score_give_exactly_no_signal() -> None:
    got = group_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64), "grpo")
    assert got.abs().max() < 1e-9


def test_integer_scores_and_wrong_arguments() -> None:
    assert_close(group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0]), "dr_grpo"), [0.5, -0.5])
    with pytest.raises(ValueError, match="kind must be"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), "mean")
    with pytest.raises(ValueError, match="must all be"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64), "grpo")


def test_step_rewards_are_normalised_within_each_label() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 1])
    mean, std = 2 / 3, math.sqrt(2) / 3
    right, wrong = (1 - mean) / (std + 1e-6), (0 - mean) / (std + 1e-6)
    assert_close(normalised_step_rewards(rewards, groups), [right, wrong, right, 0], 1e-5)  # group 1 has one step: no signal
    mean, std = 7 / 4, statistics.pstdev([1, 0, 1, 5])
    assert_close(
        normalised_step_rewards(rewards, torch.zeros(4, dtype=torch.int64)), [(r - mean) / (std + 1e-6) for r in (1, 0, 1, 5)], 1e-5
    )


def test_tokens_get_the_rewards_of_their_own_and_later_steps() -> None:
    # Steps end at the 2nd and 4th token of the first response and at the last token of the second, which is a tool's.
    rewards = torch.tensor([0.0, 1.0, 0.0, -2.0, 0.0, 0.0, 3.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    assert_close(rewards_of_own_and_later_steps(rewards, mask, torch.tensor([0, 4, 7])), [-1, -1, -2, -2, 3, 3, 0])


def test_reinforce_is_the_raw_reward_at_every_token() -> None:
    mask = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 4, 6])
    rewards = torch.tensor([0, 0, 0, 2.0, 0, -1.0])
    assert torch.equal(reward_to_go(rewards, mask, cu_seqlens), broadcast_to_tokens(torch.tensor([2.0, -1.0]), mask, cu_seqlens))
    assert_close(reward_to_go(rewards, mask, cu_seqlens, gamma=0.5), [0, 1, 0, 2, 0, -1])
    assert_close(reward_to_go(rewards, mask, cu_seqlens, gamma=0.5, bootstrap=torch.tensor([4.0, 8.0])), [0, 2, 0, 4, 0, 3])


def test_reinforce_pp_whitens_the_reward_to_go() -> None:
    mask = torch.tensor([1, 1, 0, 1], dtype=torch.bool)
    got = whiten(reward_to_go(torch.tensor([1.0, 2.0, math.nan, 1.0]), mask, torch.tensor([0, 2, 4])), mask)
    mean, std = 2.0, math.sqrt(2 / 3)  # of 3, 2, 1
    assert_close(got, [(3 - mean) / std, 0, 0, (1 - mean) / std], 1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), max_size=30))
def test_whiten_agrees_with_plain_python(rows: list[tuple[float, bool]]) -> None:
    mask = torch.tensor([here for _, here in rows], dtype=torch.bool)
    x = torch.tensor([value if here else math.nan for value, here in rows], dtype=torch.float32)
    kept = [value for value, here in rows if here]
    expected = [0.0] * len(rows)
    if len(kept) > 1:
        mean = math.fsum(kept) / len(kept)
        root = math.sqrt(math.fsum((k - mean) ** 2 for k in kept) / len(kept) + 1e-8)
        expected = [(value - mean) / root if here else 0.0 for value, here in rows]
    assert_close(whiten(x, mask), expected, 1e-5)


def test_whiten_far_from_zero_does_not_cancel() -> None:
    x = 1000.0 + torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-2
    got = whiten(x, torch.ones(4096, dtype=torch.bool)).double()
    exact = (x.double() - x.double().mean()) / (x.double().var(correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-5)
    assert abs(got.mean()) < 1e-6 and abs(got.std(correction=0) - 1) < 1e-3


def test_whiten_constant_and_integer_masks() -> None:
    assert whiten(torch.full((5,), 0.3), torch.ones(5, dtype=torch.int64)).abs().max() < 1e-6
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).shape == (0,)
