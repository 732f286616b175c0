"""Importance weights and statistics for the mismatch between the rollout engine's and the trainer's log-probs.

w_t = exp(logp_trainer_old - logp_rollout). Both engines hold the same weights but use different kernels, so w_t is close to 1 and
still biases the gradient. The mismatch is always measured, and corrected where configured. The functions take whole sequences.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.kl import LOG_RATIO_CLAMP, k3, masked_difference
from vapo_mcore.algorithm.segments import all_reduce_sum, check_packed, response_lengths, sequence_ids

ImportanceKind = Literal["off", "token_truncate", "token_mask", "sequence_mask", "sequence_product_mask"]


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kind: ImportanceKind,
    cap: float = 2.0,
    low: float = 0.5,
) -> Tensor:
    """Compute the weights that multiply the policy loss terms; float ``[total]``, no gradient, 0 at masked tokens.

    With w_t = exp(old_logprobs - rollout_logprobs), log-ratio clamped to +-20:

    - ``off``: 1;
    - ``token_truncate``: min(w_t, cap) (truncated importance sampling; ``low`` is not used);
    - ``token_mask``: w_t where low <= w_t <= cap, 0 elsewhere (icepop);
    - ``sequence_mask``: w_t at all tokens of a response whose geometric mean of w lies in [low, cap], 0 for the other responses. The
      geometric mean does not grow with the length, so one range suits short and long responses;
    - ``sequence_product_mask``: the product of w over the response, at all its tokens, where it lies in [low, cap], 0 for the other
      responses (sequence-level masked importance sampling, MIS). The sum of log-ratios is clamped to +-20.
    """
    if kind not in get_args(ImportanceKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(ImportanceKind))}, got {kind!r}")
    if not cap > 0.0 or (kind.endswith("_mask") and not 0.0 <= low < cap):
        raise ValueError(f"cap must be above 0, and the masks require 0 <= low < cap; got low {low} and cap {cap}")
    mask = mask.bool()
    if kind == "off":
        return mask.float()
    ratio, judged = _ratios(old_logprobs, rollout_logprobs, mask, cu_seqlens, kind)
    if kind == "token_truncate":
        weights = ratio.clamp(max=cap)
    else:
        kept = judged if kind == "sequence_product_mask" else ratio
        weights = torch.where((judged >= low) & (judged <= cap), kept, torch.zeros_like(kept)).to(ratio.dtype)
    return torch.where(mask, weights, torch.zeros_like(weights))


@torch.no_grad()
def importance_rejections(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kind: Literal["token_mask", "sequence_mask", "sequence_product_mask"],
    cap: float,
    low: float,
) -> dict[str, int]:
    """Count the tokens and responses that a mask of ``importance_weights`` rejects.

    ``tokens``: unmasked tokens; ``tokens_low``, ``tokens_high``: those rejected because the compared ratio (of the token, or the geometric
    mean or product of its response) is below ``low`` or above ``cap``; ``responses``: responses with an unmasked token;
    ``responses_rejected``: those that lose at least one token; ``responses_lost``: those that lose all.
    """
    mask = mask.bool()
    _, judged = _ratios(old_logprobs, rollout_logprobs, mask, cu_seqlens, kind)
    below, above = mask & (judged < low), mask & (judged > cap)
    lengths, lost = response_lengths(mask, cu_seqlens), response_lengths(below | above, cu_seqlens)
    counts = {
        "tokens": mask.sum(),
        "tokens_low": below.sum(),
        "tokens_high": above.sum(),
        "responses": (lengths > 0).sum(),
        "responses_rejected": (lost > 0).sum(),
        "responses_lost": ((lengths > 0) & (lost == lengths)).sum(),
    }
    return dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True))


def _ratios(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, kind: ImportanceKind
) -> tuple[Tensor, Tensor]:
    """Return ``(w_t, compared ratio)``, [total] each; the compared ratio is w_t, or its geometric mean or product over the response."""
    check_packed(cu_seqlens, mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = masked_difference(old_logprobs, rollout_logprobs, mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()
    if not kind.startswith("sequence"):
        return ratio, ratio
    owner = sequence_ids(cu_seqlens)
    sums = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=mask.device).index_add(0, owner, log_ratio.double())
    if kind == "sequence_mask":
        sums = sums / response_lengths(mask, cu_seqlens).clamp(min=1)
    return ratio, sums.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()[owner]


@torch.no_grad()
def mismatch_sums(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cap: float) -> dict[str, Tensor]:
    """Return what ``mismatch_statistics`` adds up over the parts of a batch; scalars, float64. Entries ending in ``_max`` are maxima.

    With d = old_logprobs - rollout_logprobs and w = exp(d), d clamped to +-20, over unmasked tokens: ``tokens``; ``abs``: |d|, not
    clamped; ``kl``: k3(d); ``ratio``: w; ``ratio_squared``; ``beyond_cap``: tokens with w > ``cap``; ``abs_max``.
    """
    mask = mask.bool()
    difference = masked_difference(old_logprobs, rollout_logprobs, mask).double()
    log_ratio = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = torch.where(mask, log_ratio.exp(), torch.zeros_like(log_ratio))
    return {
        "tokens": mask.sum().double(),
        "abs": difference.abs().sum(),
        "abs_max": torch.cat([difference.abs(), difference.new_zeros(1)]).max(),
        "kl": k3(log_ratio).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "beyond_cap": (ratio > cap).sum().double(),
    }


def mismatch_statistics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the log-prob mismatch of rollout engine and trainer from the ``mismatch_sums`` of a whole batch.

    ``logprob_abs_mean``, ``logprob_abs_max``: |old_logprobs - rollout_logprobs|; ``kl``: k3 estimate of KL(rollout || trainer); ``ess``:
    effective sample size (sum w)^2 / (N sum w^2), in (0, 1], 1 when all w are equal; ``beyond_cap_frac``: fraction with w > cap.
    Without tokens ess is 1, the others are 0.
    """
    tokens = sums["tokens"]
    count = max(tokens, 1.0)
    return {
        "logprob_abs_mean": sums["abs"] / count,
        "logprob_abs_max": sums["abs_max"],
        "kl": sums["kl"] / count,
        "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if tokens else 1.0,
        "beyond_cap_frac": sums["beyond_cap"] / count,
    }


def measure_mismatch(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: float, group: "dist.ProcessGroup | None" = None
) -> dict[str, float]:
    """Return ``mismatch_statistics`` over the unmasked tokens of all ranks of ``group`` (None: this process).

    A collective: every rank of ``group`` must call it.
    """
    sums = mismatch_sums(old_logprobs, rollout_logprobs, mask, cap)
    largest = sums.pop("abs_max")
    added = all_reduce_sum(torch.stack(list(sums.values())), group)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return mismatch_statistics({**dict(zip(sums, added.tolist(), strict=True)), "abs_max": largest.item()})
