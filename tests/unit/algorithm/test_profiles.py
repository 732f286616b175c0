"""Values and returns by position and length, against bins filled by hand."""

import torch

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
    assert (sum(found["tokens_by_position"]), sum(found["tokens_by_length"])) == (6, 6)


def test_no_token_at_all():
    empty = torch.empty(0)
    found = value_profiles(empty, empty, empty.bool(), torch.tensor([0]), 16)
    assert found["values_by_position"] == [None] * POSITION_BINS
    assert found["tokens_by_length"] == [0] * LENGTH_BINS
