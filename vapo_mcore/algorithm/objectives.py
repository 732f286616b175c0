"""Objectives of the policy besides PPO's clipped surrogate: GSPO (a ratio per sequence) and CISPO (a clipped weight, no clipped gradient).

Per-token terms like ``losses.policy_loss_terms``, for any split of a mini-batch. What a sequence-level objective needs of the other tokens
of a response, which may lie on several context-parallel ranks, comes from ``Sequences`` and carries no gradient.
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
    the same on all ranks. group: over which a sequence is split; None: whole sequences.
    """

    cu_seqlens: Tensor
    group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def sum(self, x: Tensor, mask: Tensor) -> Tensor:
        """float64 [n]: sums of ``x`` [T] over the unmasked tokens of each whole sequence. A collective over ``group``; no gradient."""
        clean = torch.where(mask, x.detach().double(), torch.zeros((), dtype=torch.float64, device=x.device))
        count = self.cu_seqlens.numel() - 1
        sums = torch.zeros(count, dtype=torch.float64, device=x.device).index_add(0, sequence_ids(self.cu_seqlens), clean)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(sums, group=self.group)
        return sums

    @torch.no_grad()
    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """float64 [n]: means over the unmasked tokens of each whole sequence, 0 where there are none; a collective, no gradient."""
        return self.sum(x, mask) / self.sum(torch.ones_like(x), mask).clamp(min=1.0)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[T]: each sequence's number at its tokens."""
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
    """GSPO (arXiv:2507.18071, Eqs. 5 to 7), as per-token terms (its GSPO-token form, Eqs. 13 and 14).

    s_i = exp(mean over the response of logp - logp_old), the mean clamped to +-20; term_t = -min(s A, clip(s, 1 - clip_low,
    1 + clip_high) A) with s = sg(s_i) exp(logp_t - sg(logp_t)): its value is s_i and its gradient s_i grad logp_t. Under the weights of
    aggregation ``sequence`` and with one advantage a response the loss and its gradient are those of Eq. 5. Arguments and indicators as of
    ``policy_loss_terms``, the ratio and the clips being those of s_i. A collective over context parallelism.
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
    """CISPO (MiniMax-M1, arXiv:2506.13585, Eqs. 4 and 5): term_t = -sg(min(r_t, 1 + clip_high)) A_t logp_t, without a lower bound.

    Every token keeps its gradient; the clip bounds its weight alone. The value of the loss is no estimate of anything. Arguments and
    indicators as of ``policy_loss_terms``; ``clip_frac_high`` counts tokens whose weight is bounded, whatever their advantage.
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
    """The indicators of ``policy_loss_terms`` for an objective that clips nothing: ratios and k3 of tokens, no clips."""
    mask = mask.bool()
    log_ratio = masked_difference(logprobs, old_logprobs, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    nothing = torch.zeros_like(log_ratio)
    clips = dict.fromkeys(("clip_frac_high", "clip_frac_low", "clip_frac_dual"), nothing)
    return clips | {"approx_kl": k3(log_ratio), "ratio": torch.where(mask, log_ratio.exp(), nothing)}
