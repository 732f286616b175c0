"""Packed-sequence helpers: placing rewards, lengths, finding bad responses."""

import math

import pytest
import torch

from vapo_mcore.algorithm import moments_kernel
from vapo_mcore.algorithm.advantages import whiten
from vapo_mcore.algorithm.checks import check_finite
from vapo_mcore.algorithm.segments import (
    broadcast_to_tokens,
    masked_moments,
    place_rewards,
    place_terminal_rewards,
    response_lengths,
    sequence_ids,
)
from vapo_mcore.errors import TrainingError

CU_SEQLENS = torch.tensor([0, 0, 3, 7, 7])
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)


def test_lengths_and_ids() -> None:
    assert response_lengths(MASK, CU_SEQLENS).tolist() == [0, 2, 2, 0]
    assert sequence_ids(CU_SEQLENS).tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert broadcast_to_tokens(torch.tensor([9.0, 1.0, 2.0, 9.0]), MASK, CU_SEQLENS).tolist() == [0, 1, 1, 0, 2, 0, 2]
    assert broadcast_to_tokens(torch.tensor([math.nan, 1.0, math.nan, 9.0]), MASK & (torch.arange(7) < 3), CU_SEQLENS).tolist()[:3] == [
        0,
        1,
        1,
    ]


def test_scenario_26_token_counts_are_integers() -> None:
    lengths = torch.full((512,), 33_000, dtype=torch.int64)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.ones(512 * 33_000, dtype=torch.bool)
    mask[0] = False
    assert response_lengths(mask, cu_seqlens).sum().item() == 16_895_999  # float32 would say 16_896_000
    count, mean, _ = masked_moments(mask.float(), mask)
    assert (count.item(), mean.item()) == (16_895_999, 1.0)


def test_turn_rewards_land_on_the_last_token_at_or_before_and_add_up() -> None:
    amounts, positions = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 4, 5, 6])
    assert place_rewards(amounts, positions, MASK, CU_SEQLENS).tolist() == [0, 1, 0, 0, 6, 0, 8]


def test_a_turn_reward_never_slips_into_the_response_before() -> None:
    with pytest.raises(ValueError, match=r"\[3\]"):
        place_rewards(torch.tensor([1.0]), torch.tensor([3]), MASK, CU_SEQLENS)


def test_terminal_rewards_of_an_empty_pack() -> None:
    assert place_terminal_rewards(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.tensor([0])).shape == (0,)
    assert place_terminal_rewards(torch.ones(2), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 3])).tolist() == [0, 0, 0]


def test_scenario_12_nan_at_a_masked_position_passes_and_at_a_response_token_names_the_response() -> None:
    logprobs = torch.tensor([math.nan, -1, -1, math.inf, -1, math.nan, -1])
    check_finite({"old_logprobs": logprobs}, MASK, CU_SEQLENS)
    logprobs[4] = math.nan
    rewards = torch.zeros(7)
    rewards[2] = -math.inf
    with pytest.raises(TrainingError) as caught:
        check_finite({"old_logprobs": logprobs, "rewards": rewards}, MASK, CU_SEQLENS, ["a", "set/7#0", "set/7#1", "d"])
    message = str(caught.value)
    assert "old_logprobs: response set/7#1 (first at packed token 4: nan)" in message
    assert "rewards: response set/7#0 (first at packed token 2: -inf)" in message


@pytest.mark.parametrize("tokens", [0, 1, 3, 257, 16_383, 16_385, 40_001])
@pytest.mark.parametrize("threads", [1, 3])
def test_host_moments_equal_exact_sums_at_block_and_lane_edges(tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_kernel, "_MIN_TOKENS_PER_THREAD", 4_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(tokens)
    x, mask = torch.randn(tokens, generator=generator) + 100, torch.rand(tokens, generator=generator) < 0.7
    x[~mask] = math.nan
    chosen = [float(value) for value in x[mask].double()]
    count, mean, variance = masked_moments(x, mask)
    exact = math.fsum(chosen) / max(len(chosen), 1)
    assert int(count) == len(chosen)
    assert float(mean) == pytest.approx(exact, rel=1e-15)
    assert float(variance) == pytest.approx(math.fsum((value - exact) ** 2 for value in chosen) / max(len(chosen), 1), rel=1e-12)
    white = whiten(x, mask)
    assert bool((white[~mask] == 0).all())
    wanted = (x[mask].double() - mean) / (variance + 1e-8).sqrt()
    torch.testing.assert_close(white[mask].double(), wanted, atol=1e-6, rtol=1e-6)


def test_host_moments_pass_on_what_is_not_finite() -> None:
    x = torch.tensor([math.inf, -math.inf, 1.0])
    assert math.isnan(masked_moments(x, torch.ones(3, dtype=torch.bool))[1])
    assert not math.isfinite(masked_moments(x, torch.tensor([True, False, True]))[1])


def test_host_moments_of_equal_numbers_over_many_blocks_are_exact_up_to_two_roundings_of_a_blocks_mean() -> None:
    x = torch.full((100_001,), 0.1, dtype=torch.float64)
    _, mean, variance = masked_moments(x, torch.arange(100_001) % 7 > 0)
    assert float(mean) == 0.1
    assert float(variance) <= (2 * 2**-53 * 0.1) ** 2
