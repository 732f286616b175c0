"""Estimators of KL(policy || reference) from sampled tokens: k1, k2, k3 (J. Schulman, "Approximating KL Divergence", 2020)."""

from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]

# Log-ratios are clamped to +-20: e^20 = 5e8 is beyond any meaningful ratio, and exp stays finite in float32.
LOG_RATIO_CLAMP = 20.0


def masked_difference(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Compute ``logprobs - reference`` where ``mask``, 0 elsewhere, in float32 or wider; float ``[total]``.

    Masked inputs are replaced by 0 *before* the subtraction, so a NaN there reaches neither the result nor (as 0 * NaN) the gradient.
    Every function of two log-probs in this package starts with it.
    """
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    mask = mask.bool()
    return torch.where(mask, logprobs, zero) - torch.where(mask, reference, zero)


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KLKind, mask: Tensor | None = None, clamp: float | None = None) -> Tensor:
    """Estimate KL(policy || reference) per token from tokens of the policy; float ``[total]``, 0 at masked tokens.

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
    """Compute r - 1 - log r for r = exp(log_ratio), the log-ratio clamped to +-20; uses expm1, which is accurate for ratios near 1."""
    clamped = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.expm1(clamped) - clamped


def kl_loss_terms(logprobs: Tensor, reference: Tensor, mask: Tensor, kind: KLKind, clamp: float | None = None) -> Tensor:
    """Compute the per-token KL penalty of the loss (``kl.place: loss``); [total], differentiable.

    Raises ``ValueError`` for k1, whose expected gradient, E[grad log pi], is zero.
    """
    if kind == "k1":
        raise ValueError("k1 as a loss has an expected gradient of zero; use k2 or k3, or put the KL in the reward")
    return kl_estimate(logprobs, reference, kind, mask, clamp)
