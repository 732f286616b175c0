"""Values and returns by position in the response and by its length: where along a response the critic is wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.segments import all_reduce_sum, response_lengths

POSITION_BINS = 20
"""Equal parts of a response, whatever its length."""
LENGTH_BINS = 16
"""Equal bins of 1 to the longest length that a response may have."""


def length_bins(lengths: Tensor, max_length: int) -> Tensor:
    """int64 [n]: the bin of each length (int64 [n]): bin k has those above k max_length / 16 and up to (k + 1) max_length / 16.

    0 is in the first bin, a length above ``max_length`` in the last.
    """
    return ((lengths * LENGTH_BINS - 1) // max_length).clamp(0, LENGTH_BINS - 1)


def value_profiles(
    values: Tensor, returns: Tensor, mask: Tensor, cu_seqlens: Tensor, max_length: int, group: dist.ProcessGroup | None = None
) -> dict[str, list[float | None]]:
    """Means over the unmasked tokens of each bin, and their number, over all ranks of ``group``: one reduction, a collective.

    Args:
        values, returns: float [total]; masked entries are never read.
        mask: bool [total]; cu_seqlens: int [n + 1].
        max_length: where the bins of lengths end.

    Returns: ``values_by_position``, ``returns_by_position``, ``tokens_by_position`` of ``POSITION_BINS`` entries, and the same
        ``_by_length`` of ``LENGTH_BINS``. A mean over no token is None. Token k (from 0) of a response of l is in part floor(20 k / l).
    """
    lengths = response_lengths(mask, cu_seqlens)
    of_token = torch.repeat_interleave(lengths, lengths)
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    position = (torch.arange(of_token.numel(), device=mask.device) - before) * POSITION_BINS // of_token
    bins = torch.cat([position, POSITION_BINS + length_bins(of_token, max_length)])
    chosen = [values[mask].detach().double(), returns[mask].detach().double()]
    amounts = torch.stack([torch.ones_like(chosen[0]), *chosen]).repeat(1, 2)
    sums = torch.zeros(3, POSITION_BINS + LENGTH_BINS, dtype=torch.float64, device=mask.device).index_add_(1, bins, amounts)
    tokens, *totals = all_reduce_sum(sums, group).tolist()
    result: dict[str, list[float | None]] = {}
    for name, part in (("position", slice(0, POSITION_BINS)), ("length", slice(POSITION_BINS, None))):
        for what, total in zip(("values", "returns"), totals, strict=True):
            result[f"{what}_by_{name}"] = [s / n if n else None for s, n in zip(total[part], tokens[part], strict=True)]
        result[f"tokens_by_{name}"] = [int(n) for n in tokens[part]]
    return result
