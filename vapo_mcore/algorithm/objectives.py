"""Alternatives to PPO's clipped surrogate: GSPO (one ratio per sequence) and CISPO (clips the weight, not the gradient).

Like ``losses.policy_loss_terms`` they return per-token terms, for any split of a mini-batch. A sequence-level objective reads sums and
means over whole responses, which may lie on several context-parallel ranks, from ``Sequences``; these carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.kl import LOG_RATIO_CLAMP, k3, masked_difference
from vapo_mcore.algorithm.losses import Clips, clipped_terms
from vapo_mcore.algorithm.segments import sequence_ids


@dataclass(frozen=True)
class Sequences:
    """The sequences of a micro-batch as one context-parallel rank holds them.

    cu_seqlens: int [n + 1], bounds of this rank's part of each sequence (padding included) among its T tokens; ``n`` and the order are
    the same on all ranks. group: the context-parallel group that splits each sequence; None: sequences are whole.
    """

    cu_seqlens: Tensor
    group: dist.ProcessGroup | None = None

    def only(self, mask: Tensor) -> Sequences:
        """Return the same ``n`` sequences of the unmasked tokens alone: bounds among ``x[mask]``. ``mask``: bool [T]."""
        counts = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
        torch.cumsum(mask, 0, out=counts[1:])
        return Sequences(counts[self.cu_seqlens], self.group)

    @torch.no_grad()
    def sum(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Sum ``x`` [T] over the unmasked tokens of each whole sequence: float64 [n], no gradient. A collective over ``group``.

        ``mask``: bool [T]; None: all tokens.
        """
        clean = x.detach().double()
        clean = clean if mask is None else torch.where(mask, clean, torch.zeros((), dtype=torch.float64, device=x.device))
        count = self.cu_seqlens.numel() - 1
        sums = torch.zeros(count, dtype=torch.float64, device=x.device).index_add(0, sequence_ids(self.cu_seqlens), clean)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(sums, group=self.group)
        return sums

    @torch.no_grad()
    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Average ``x`` like ``sum``: float64 [n], 0 for sequences without unmasked tokens. A collective over ``group``."""
        return self.sum(x, mask) / self.sum(torch.ones_like(x), mask).clamp(min=1.0)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Expand one number per sequence to its tokens: [n] -> [T]."""
        return per_sequence[sequence_ids(self.cu_seqlens)]


def gspo_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the per-token terms of GSPO (arXiv:2507.18071, Eqs. 5 to 7; the GSPO-token form of Eqs. 13 and 14).

    s_i = exp(mean over the response of logp - logp_old), the mean clamped to +-20; term_t = -min(s A, clip(s, 1 - clip_low,
    1 + clip_high) A) with s = sg(s_i) exp(logp_t - sg(logp_t)), which has value s_i and gradient s_i grad logp_t. With aggregation
    ``sequence`` and one advantage per response, loss and gradient are those of Eq. 5. Arguments and indicators are those of
    ``policy_loss_terms``, with ratio and clips of s_i. A collective over the context-parallel group.
    """
    mask = mask.bool()
    log_ratio = masked_difference(logprobs.detach(), old_logprobs.detach(), mask)
    mean = sequences.mean(log_ratio, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = sequences.spread(mean.exp()).to(logprobs.dtype) * masked_difference(logprobs, logprobs.detach(), mask).exp()
    estimate = k3(log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    clips: Clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return clipped_terms(ratio, estimate, advantages, mask, importance_weights=importance_weights, **clips)


def cispo_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_high: float,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute CISPO's terms (MiniMax-M1, arXiv:2506.13585, Eqs. 4 and 5): -sg(min(r_t, 1 + clip_high)) A_t logp_t, no lower bound.

    Every token keeps its gradient; only its weight is clipped. The value of the loss has no meaning. Arguments and indicators are those
    of ``policy_loss_terms``; ``clip_frac_high`` counts the tokens whose weight is clipped, for either sign of the advantage.
    """
    mask = mask.bool()
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    log_ratio = masked_difference(logprobs.detach(), old_logprobs.detach(), mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=1.0 + clip_high) * torch.where(mask, advantages.detach(), zero)
    if importance_weights is not None:
        weight = weight * torch.where(mask, importance_weights.detach(), zero)
    indicators = ratio_indicators(logprobs, old_logprobs, mask) | {"clip_frac_high": (mask & (ratio > 1.0 + clip_high)).float()}
    return -weight * torch.where(mask, logprobs, zero), indicators


@torch.no_grad()
def ratio_indicators(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute the indicators of ``policy_loss_terms`` for an objective without clipping: token ratios and k3; clip fractions are 0."""
    mask = mask.bool()
    log_ratio = masked_difference(logprobs, old_logprobs, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    nothing = torch.zeros_like(log_ratio)
    clips = dict.fromkeys(("clip_frac_high", "clip_frac_low", "clip_frac_dual"), nothing)
    return clips | {"approx_kl": k3(log_ratio), "ratio": torch.where(mask, log_ratio.exp(), nothing)}
