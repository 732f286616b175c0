"""Profiles of the critic: mean values and returns by position in the response, by response length and by predicted value."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.segments import all_reduce_sum, response_lengths

POSITION_BINS = 20
"""Number of equal parts a response is divided into, at any length."""
LENGTH_BINS = 16
"""Number of equal bins from 1 to the maximum response length."""


PREDICTION_BINS = 10
"""Number of equal bins of the reward range."""


def length_bins(lengths: Tensor, max_length: int) -> Tensor:
    """Return the bin of each length, int64 [n]: bin k holds lengths above k max_length / 16 and up to (k + 1) max_length / 16.

    Length 0 falls in the first bin, a length above ``max_length`` in the last.
    """
    return ((lengths * LENGTH_BINS - 1) // max_length).clamp(0, LENGTH_BINS - 1)


def value_profiles(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    group: dist.ProcessGroup | None = None,
    outcomes: Tensor | None = None,
    reward_range: tuple[float, float] = (0.0, 1.0),
) -> dict[str, list[float | None]]:
    """Compute means and counts of the unmasked tokens per bin, over all ranks of ``group``. A collective with one reduction.

    Args:
        values, returns: float [total]; masked entries are not read.
        mask: bool [total]; cu_seqlens: int [n + 1].
        max_length: upper end of the length bins.
        outcomes: float [total], Monte-Carlo returns that explained variance and calibration compare with; None: ``returns``.
        reward_range: ends of the prediction bins; values outside fall in the first or last bin.

    Returns: ``values_by_position``, ``returns_by_position``, ``tokens_by_position`` and ``explained_variance_by_position`` with
        ``POSITION_BINS`` entries each, the same ``*_by_length`` with ``LENGTH_BINS``, and, without explained variance,
        ``*_by_prediction`` with ``PREDICTION_BINS`` (calibration). The mean of an empty bin and the explained variance of constant
        returns are None. Token k (from 0) of a response of length l is in position bin floor(20 k / l).
    """
    lengths = response_lengths(mask, cu_seqlens)
    of_token = torch.repeat_interleave(lengths, lengths)
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    position = (torch.arange(of_token.numel(), device=mask.device) - before) * POSITION_BINS // of_token
    outcomes = returns if outcomes is None else outcomes
    value, target, outcome = (x[mask].detach().double() for x in (values, returns, outcomes))
    low, high = reward_range
    prediction = ((value - low) / (high - low) * PREDICTION_BINS).floor().clamp(0, PREDICTION_BINS - 1).long()
    ends = POSITION_BINS, POSITION_BINS + LENGTH_BINS, POSITION_BINS + LENGTH_BINS + PREDICTION_BINS
    bins = torch.cat([position, ends[0] + length_bins(of_token, max_length), ends[1] + prediction])
    error = outcome - value
    amounts = torch.stack([torch.ones_like(value), value, target, outcome, outcome.square(), error.square()]).repeat(1, 3)
    sums = torch.zeros(len(amounts), ends[2], dtype=torch.float64, device=mask.device).index_add_(1, bins, amounts)
    tokens, *totals = all_reduce_sum(sums, group).tolist()
    result: dict[str, list[float | None]] = {}
    parts = {"position": slice(0, ends[0]), "length": slice(ends[0], ends[1]), "prediction": slice(ends[1], ends[2])}
    for name, part in parts.items():
        columns = [total[part] for total in totals]
        shown = {"values": columns[0], "returns": columns[2] if name == "prediction" else columns[1]}
        for what, column in shown.items():
            result[f"{what}_by_{name}"] = [s / n if n else None for s, n in zip(column, tokens[part], strict=True)]
        result[f"tokens_by_{name}"] = [int(n) for n in tokens[part]]
        if name != "prediction":
            rounding = 4.0 * torch.finfo(outcomes.dtype).eps
            outcome_sums, squares, errors = columns[2:]
            entries = zip(tokens[part], columns[0], outcome_sums, squares, errors, strict=True)
            result[f"explained_variance_by_{name}"] = [_explained(n, v, r, rr, ee, rounding) for n, v, r, rr, ee in entries]
    return result


def _explained(count: float, values: float, returns: float, squares: float, errors: float, rounding: float) -> float | None:
    """Compute 1 - Var(R - V) / Var(R) of a bin from its sums; None if it has no returns or they are constant up to rounding."""
    if count == 0:
        return None
    mean, bias = returns / count, (returns - values) / count
    variance = squares / count - mean**2
    if variance <= rounding**2 * max(squares / count, 1e-300) or variance <= 1e-14 * squares / count:
        return None
    return 1.0 - (errors / count - bias**2) / variance
