"""Index arithmetic on ragged tensors (flat data + cumulative lengths), without Python loops over tokens or rows."""

import torch
from torch import Tensor


def cumulative(lengths: Tensor) -> Tensor:
    """Return the offsets of consecutive segments: int64 ``[n]`` lengths -> int64 ``[n + 1]``, starting at 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def segment_ids(lengths: Tensor) -> Tensor:
    """Return the segment index of each element, int64 ``[sum(lengths)]``."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def segment_positions(lengths: Tensor) -> Tensor:
    """Return the position of each element inside its segment, int64 ``[sum(lengths)]``."""
    starts = cumulative(lengths)[:-1]
    return torch.arange(int(lengths.sum()), device=lengths.device) - torch.repeat_interleave(starts, lengths)


def token_index(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """Return the flat positions of the tokens of ``rows`` (int64 ``[k]``, any order, repeats allowed), row by row."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1])[rows]
    return torch.repeat_interleave(cu_seqlens[:-1][rows], lengths) + segment_positions(lengths)
