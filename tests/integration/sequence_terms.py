"""Loss terms that read sequences; their values follow from the lengths of the responses alone, their gradient is the log-prob's."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_mcore.algorithm.objectives import Sequences


def place(logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The place of each token in its response, from 1. With context parallelism, of this rank's part of it."""
    lengths = cu_seqlens.diff()
    numbers = torch.arange(1, logprobs.numel() + 1, device=logprobs.device) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return numbers + logprobs - logprobs.detach()


def share(logprobs: Tensor, sequences: Sequences) -> Tensor:
    """1 / tokens of the response, over all context-parallel ranks."""
    lengths = sequences.sum(torch.ones_like(logprobs))
    return sequences.spread(1 / lengths).float() + logprobs - logprobs.detach()


def across(logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Refused: the number of the token in its micro-batch."""
    return logprobs * (torch.arange(logprobs.numel()) + cu_seqlens[0])
