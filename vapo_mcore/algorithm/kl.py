"""Estimators of KL(policy || reference) from sampled tokens: k1, k2, k3 (J. Schulman, "Approximating KL Divergence", 2020)."""

from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

# |log-ratio| beyond this says nothing more (e^20 = 5e8), and exp stays finite in float32.
LOG_RATIO_CLAMP = 20.0


def masked_difference(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """``logprobs - reference`` where ``mask``, 0 elsewhere, in float32 or wider; float ``[total]``.

    The inputs are replaced *before* the subtraction: a NaN at a masked position reaches neither the result nor, as 0 * NaN, the
    gradient. Every function of two log-probs in this package starts here.
    """
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    mask = mask.bool()
    return torch.where(mask, logprobs, zero) - torch.where(mask, reference, zero)


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KLKind, mask: Tensor | None = None, clamp: float | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference), tokens sampled from the policy; float ``[total]``, 0 at masked tokens.

    With d = logprobs - reference: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d (never negative; GRPO's, DeepSeekMath Eq. 4). The
    log-ratio inside k3 is clamped to +-20. ``clamp`` bounds the estimate itself to [-clamp, clamp] (None: no bound); a clamped token has
    no gradient. Differentiable in ``logprobs``.
    """
    if kind not in ("k1", "k2", "k3"):
        raise ValueError(f"kind must be k1, k2 or k3, got {kind!r}")
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    difference = masked_difference(logprobs, reference, mask)
    if kind == "k1":
        estimate = difference
    elif kind == "k2":
        estimate = 0.5 * difference.square()
    else:
        estimate = k3(-difference)
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r for r = exp(log_ratio), clamped to +-20; written with expm1, exact for ratios near 1."""
    clamped = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.expm1(clamped) - clamped


def kl_loss_terms(logprobs: Tensor, reference: Tensor, mask: Tensor, kind: KLKind, clamp: float | None = None) -> Tensor:
    """Per-token KL penalty for the loss (``kl.place: loss``); [total], differentiable.

    k1 is refused with ``ValueError``: the expectation of its gradient, E[grad log pi], is zero.
    """
    if kind == "k1":
        raise ValueError("k1 as a loss has an expected gradient of zero; use k2 or k3, or put the KL in the reward")
    return kl_estimate(logprobs, reference, kind, mask, clamp)
