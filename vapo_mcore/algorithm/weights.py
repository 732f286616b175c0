"""Per-token loss weights and the mini-batch denominators, computed before packing.

A loss is sum_t w_t term_t with the w_t of this module. The denominators count the whole mini-batch (all micro-batches, all ranks), so
summing losses and gradients over micro-batches and ranks gives those of the mini-batch for any split.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from vapo_mcore.algorithm.segments import response_lengths

Aggregation = Literal["token", "sequence", "sequence_sum", "fixed_length"]


@dataclass(frozen=True)
class Denominators:
    """Counts over a whole mini-batch, as exact Python integers.

    tokens: unmasked tokens; sequences: responses with at least one of them; positive_tokens: tokens of correct responses, unmasked ones
    or, if the positive-example loss covers more than the others, all.
    """

    tokens: int
    sequences: int
    positive_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sequences <= self.tokens or not self.positive_tokens >= 0:
            raise ValueError(f"impossible counts (0 <= sequences <= tokens, 0 <= positive_tokens): {self}")

    @classmethod
    def from_lengths(cls, lengths: Tensor, positive: Tensor | None = None) -> "Denominators":
        """Build from per-response data: lengths int [n], unmasked tokens (0 if filtered out); positive bool [n], the raw verdicts."""
        lengths = lengths.long()
        positive_tokens = 0 if positive is None else int(lengths[positive.bool()].sum())
        return cls(tokens=int(lengths.sum()), sequences=int((lengths > 0).sum()), positive_tokens=positive_tokens)

    @classmethod
    def from_mask(cls, mask: Tensor, cu_seqlens: Tensor, positive: Tensor | None = None) -> "Denominators":
        """Build from token masks: mask bool [total], cu_seqlens [n + 1], positive bool [n]."""
        return cls.from_lengths(response_lengths(mask, cu_seqlens), positive)


def token_weights(
    mask: Tensor,
    cu_seqlens: Tensor,
    aggregation: Aggregation,
    max_length: int | None = None,
    denominators: Denominators | None = None,
) -> Tensor:
    """Compute the loss weights w_t, 0 at masked tokens; float32 ``[total]``.

    ``token``: 1 / N (DAPO Eq. 12, VAPO Eq. 7); ``sequence``: 1 / (n l_i), the mean over responses of their token means (VAPO Eq. 6);
    ``sequence_sum``: 1 / n, the mean over responses of their token sums (RLOO: the whole response is the action, and its log-probability
    the sum); ``fixed_length``: 1 / (n L_max), Dr. GRPO, requires ``max_length`` = L_max. N counts unmasked tokens, n responses with at
    least one; both come from ``denominators`` (None: from this call, which is then the whole mini-batch). l_i counts the unmasked
    tokens of response i, so a response must not be split between calls. Without unmasked tokens all weights are 0.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, got {aggregation!r}")
    mask = mask.bool()
    if denominators is None:
        denominators = Denominators.from_mask(mask, cu_seqlens)
    if aggregation == "token":
        return mask.float() / max(denominators.tokens, 1)
    if aggregation == "sequence_sum":
        return mask.float() / max(denominators.sequences, 1)
    if aggregation == "fixed_length":
        if max_length is None or max_length <= 0:
            raise ValueError(f"aggregation fixed_length requires a positive max_length, got {max_length}")
        return mask.float() / (max(denominators.sequences, 1) * max_length)
    per_response = 1.0 / (max(denominators.sequences, 1) * response_lengths(mask, cu_seqlens).clamp(min=1).double())
    spread = torch.repeat_interleave(per_response.float(), cu_seqlens.diff().long())
    return torch.where(mask, spread, torch.zeros_like(spread))


def positive_token_weights(mask: Tensor, positive_mask: Tensor, denominators: Denominators | None = None) -> Tensor:
    """Compute the weights of the positive-example loss, float32 ``[total]``: 1 / count at the counted tokens, 0 elsewhere (VAPO Eq. 9).

    The count covers the unmasked tokens of correct responses in the mini-batch. positive_mask: bool [total], True at the tokens of
    correct responses. Without correct responses all weights are exactly 0.
    """
    chosen = mask.bool() & positive_mask.bool()
    count = int(chosen.sum()) if denominators is None else denominators.positive_tokens
    return chosen.float() / max(count, 1)
