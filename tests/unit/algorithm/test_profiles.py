"""Values and returns by position and length, against bins filled by hand."""

import torch

from tests.training_setup import assert_same_means
from vapo_mcore.algorithm.losses import explained_variance
from vapo_mcore.algorithm.profiles import LENGTH_BINS, POSITION_BINS, length_bins, value_profiles


def filled(column):
    return {number: value for number, value in enumerate(column) if value is not None}


def test_lengths_at_the_edges_of_their_bins():
    lengths = torch.tensor([0, 1, 2, 3, 31, 32, 33, 500])
    assert length_bins(lengths, 32).tolist() == [0, 0, 0, 1, 15, 15, 15, 15]
    assert length_bins(torch.tensor([1, 5, 6, 10, 16, 80]), 80).tolist() == [0, 0, 1, 1, 3, 15]  # 5 tokens a bin
    assert length_bins(torch.tensor([35, 36, 37, 38, 40]), 40).tolist() == [13, 14, 14, 15, 15]  # edges at 35 and 37.5
    assert length_bins(torch.tensor([1, 2, 3]), 3).tolist() == [5, 10, 15]  # fewer lengths than bins


def test_two_responses_by_hand():
    """2 prompt tokens before each; 4 tokens fall in parts 0, 5, 10, 15 and 2 in 0 and 10. Masked entries hold NaN."""
    nan = float("nan")
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)  # a tool's token inside the first
    values = torch.tensor([nan, nan, 1.0, 2.0, nan, 3.0, 4.0, nan, nan, 10.0, 20.0])
    returns = torch.tensor([nan, nan, 1.0, 1.0, nan, 1.0, 1.0, nan, nan, -1.0, 0.0])
    found = value_profiles(values, returns, mask, torch.tensor([0, 7, 11]), 16)
    assert filled(found["values_by_position"]) == {0: 5.5, 5: 2, 10: 11.5, 15: 4}
    assert filled(found["returns_by_position"]) == {0: 0, 5: 1, 10: 0.5, 15: 1}
    assert [found["tokens_by_position"][number] for number in (0, 1, 5, 10, 15)] == [2, 0, 1, 2, 1]
    assert filled(found["values_by_length"]) == {1: 15, 3: 2.5}
    assert filled(found["returns_by_length"]) == {1: -0.5, 3: 1}
    assert (sum(found["tokens_by_position"]), sum(found["tokens_by_length"]), sum(found["tokens_by_prediction"])) == (6, 6, 6)


def test_explained_variance_of_each_bin_is_that_of_its_tokens():
    """Two lengths and 20 positions, against ``explained_variance`` of the tokens of one bin alone."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([20] * 30 + [40] * 50)
    cu_seqlens = torch.tensor([0, *lengths.cumsum(0).tolist()])
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) > -1
    returns = (torch.rand(80, generator=generator) < 0.4).float().repeat_interleave(lengths)
    returns[: 20 * 30] += 7.0  # a constant does not matter
    values = returns + torch.randn(total, generator=generator)
    found = value_profiles(values, torch.full_like(returns, float("nan")), mask, cu_seqlens, 40, outcomes=returns)
    of_token = lengths.repeat_interleave(lengths)
    place = (torch.arange(total) - cu_seqlens[:-1].repeat_interleave(lengths)) * 20 // of_token
    for name, labels, count in (("position", place, 20), ("length", (of_token - 1) * 16 // 40, 16)):
        expected = [explained_variance(values, returns, labels == number) if (labels == number).any() else None for number in range(count)]
        assert_same_means(found[f"explained_variance_by_{name}"], expected, name)
        assert sum(value is not None for value in expected) == (20 if name == "position" else 2)


def test_constant_returns_explain_nothing_defined():
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = value_profiles(values, torch.full((4,), 0.1), torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]), 16)
    assert found["explained_variance_by_length"] == [None] * LENGTH_BINS


def test_calibration_by_hand():
    """Rewards of -1 to 1 in ten bins of 0.2; values beyond are in the end bins."""
    values = torch.tensor([-3.0, -0.95, -0.1, 0.1, 0.15, 1.0, 2.0])
    returns = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0])
    mask, whole = torch.ones(7, dtype=torch.bool), torch.tensor([0, 7])
    found = value_profiles(values, torch.zeros(7), mask, whole, 16, outcomes=returns, reward_range=(-1.0, 1.0))
    assert found["tokens_by_prediction"] == [2, 0, 0, 0, 1, 2, 0, 0, 0, 2]
    assert_same_means(found["values_by_prediction"], [-1.975, None, None, None, -0.1, 0.125, None, None, None, 1.5], "values")
    assert_same_means(found["returns_by_prediction"], [-1.0, None, None, None, 1.0, 0.0, None, None, None, 1.0], "returns")


def test_no_token_at_all():
    empty = torch.empty(0)
    found = value_profiles(empty, empty, empty.bool(), torch.tensor([0]), 16)
    assert found["values_by_position"] == [None] * POSITION_BINS
    assert found["tokens_by_length"] == [0] * LENGTH_BINS
