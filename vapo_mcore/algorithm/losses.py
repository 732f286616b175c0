"""The losses of policy and critic: clipped surrogate, value regression, positive-example NLL; explained variance.

Each loss has two functions. ``*_terms`` returns per-token terms of flat tensors in any order or layout; the training engine calls it
and multiplies with weights from ``weights.py`` computed for the whole mini-batch. The function without the suffix combines terms and
weights into a scalar, for whole sequences. Inputs that take no gradient (old log-probs, advantages, returns, ...) are detached here.
"""

from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.kl import LOG_RATIO_CLAMP, k3, masked_difference
from vapo_mcore.algorithm.segments import check_packed, masked_moments
from vapo_mcore.algorithm.weights import Aggregation, Denominators, positive_token_weights, token_weights


class Clips(TypedDict):
    """Clip settings of ``policy_loss_terms``."""

    clip_low: float
    clip_high: float
    dual_clip: float | None


def policy_loss_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the per-token clipped surrogate loss, and per-token indicators whose token means are logged.

    r = exp(logp - logp_old), log-ratio clamped to +-20; term = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO,
    arXiv:1707.06347, Eq. 7, with DAPO's two ranges, Eq. 10). With ``dual_clip`` c (arXiv:1912.09729, Eq. 5) the objective is bounded
    below by c A where A < 0. ``importance_weights`` (float [T], e.g. truncated importance sampling) multiply the term.

    All tensors float [T], mask bool [T]; differentiable only in ``logprobs``. Masked tokens have term 0 and gradient 0. The dict
    holds float [T] tensors, 0 at masked tokens: ``clip_frac_high`` (A > 0 and r above the range),
    ``clip_frac_low`` (A < 0 and r below it), ``clip_frac_dual``, ``approx_kl`` (k3: r - 1 - log r), ``ratio``.
    """
    mask = mask.bool()
    log_ratio = masked_difference(logprobs, old_logprobs.detach(), mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    clips: Clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return clipped_terms(log_ratio.exp(), k3(log_ratio.detach()), advantages, mask, importance_weights=importance_weights, **clips)


def clipped_terms(
    ratio: Tensor,
    approx_kl: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    importance_weights: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute ``policy_loss_terms`` from ratios (float [T], finite everywhere, with gradient); returns ``approx_kl`` unchanged."""
    _check_clip(clip_low, clip_high, dual_clip)
    advantages = _masked(advantages.detach(), mask)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    dual = torch.zeros_like(mask)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual = (advantages < 0) & (objective < floor)
        objective = torch.where(dual, floor, objective)
    if importance_weights is not None:
        objective = objective * _masked(importance_weights.detach(), mask)
    with torch.no_grad():
        indicators = {
            "clip_frac_high": ((advantages > 0) & (ratio > 1.0 + clip_high)).float(),
            "clip_frac_low": ((advantages < 0) & (ratio < 1.0 - clip_low)).float(),
            "clip_frac_dual": dual.float(),
            "approx_kl": approx_kl,
            "ratio": torch.where(mask, ratio.detach(), torch.zeros_like(ratio)),
        }
    return -objective, indicators


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token",
    max_length: int | None = None,
    denominators: Denominators | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``(loss, stats)``: ``policy_loss_terms`` summed with the weights of ``token_weights``.

    Tensors float [total], mask bool [total], cu_seqlens int [n + 1]. ``denominators`` are those of the whole mini-batch, of which
    this call may be a part: losses and gradients of the parts add up to the whole. None: this call is the mini-batch.

    stats: detached scalars, token means over the mini-batch (parts add up): ``clip_frac_high``, ``clip_frac_low``, ``clip_frac_dual``,
    ``approx_kl``, ``ratio_mean``.
    """
    check_packed(cu_seqlens, mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    mask = mask.bool()
    if denominators is None:
        denominators = Denominators.from_mask(mask, cu_seqlens)
    clips: Clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    terms, indicators = policy_loss_terms(logprobs, old_logprobs, advantages, mask, **clips)
    weights = token_weights(mask, cu_seqlens, aggregation, max_length, denominators)
    indicators["ratio_mean"] = indicators.pop("ratio")
    stats = {name: _token_mean(indicator, denominators.tokens) for name, indicator in indicators.items()}
    return (terms * weights).sum(), stats


def value_loss_terms(
    values: Tensor, old_values: Tensor | None, returns: Tensor, mask: Tensor, *, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the per-token value loss 1/2 (V - R)^2; with ``clip`` eps, 1/2 max((V - R)^2, (clip(V, V_old +- eps) - R)^2).

    The clipped form is that of common PPO implementations. values, old_values, returns: float [T]; mask: bool [T]; ``old_values`` may be
    None without ``clip``. Differentiable only in ``values``; masked tokens have term 0 and gradient 0. The dict holds ``clip_frac``,
    1.0 where the clipped branch is the larger.
    """
    mask = mask.bool()
    values, returns = _masked(values, mask), _masked(returns.detach(), mask)
    squared = (values - returns).square()
    if clip is None:
        return 0.5 * squared, {"clip_frac": torch.zeros_like(squared.detach())}
    if not clip > 0:
        raise ValueError(f"the value clip range must be above 0, got {clip}")
    if old_values is None:
        raise ValueError("clip requires old_values, the values predicted before the update")
    old_values = _masked(old_values.detach(), mask)
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    clipped_squared = (clipped - returns).square()
    return 0.5 * torch.maximum(squared, clipped_squared), {"clip_frac": (clipped_squared > squared).detach().float()}


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    denominators: Denominators | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``(loss, stats)``: the token means of ``value_loss_terms`` and of ``clip_frac``.

    ``denominators`` as in ``policy_loss`` (``tokens`` is used): parts of a mini-batch add up. Without tokens the loss is 0.
    """
    mask = mask.bool()
    terms, indicators = value_loss_terms(values, old_values, returns, mask, clip=clip)
    tokens = int(mask.sum()) if denominators is None else denominators.tokens
    return _token_mean(terms, tokens), {"clip_frac": _token_mean(indicators["clip_frac"], tokens)}


def positive_nll_terms(logprobs: Tensor, mask: Tensor, positive_mask: Tensor) -> Tensor:
    """Return -log pi at the unmasked tokens of correct responses, 0 elsewhere; float [T], differentiable."""
    return -_masked(logprobs, mask.bool() & positive_mask.bool())


def positive_nll(logprobs: Tensor, mask: Tensor, positive_mask: Tensor, denominators: Denominators | None = None) -> Tensor:
    """Compute VAPO's positive-example LM loss (Eq. 9): the mean of -log pi over the tokens of correct responses of the mini-batch.

    positive_mask: bool [total], True at tokens of responses that the verifier graded correct (raw verdict). ``denominators``: those
    of the whole mini-batch (``positive_tokens`` is used). Without correct responses loss and gradient are exactly 0.
    """
    weights = positive_token_weights(mask, positive_mask, denominators)
    return (positive_nll_terms(logprobs, mask, positive_mask) * weights).sum()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, group: "dist.ProcessGroup | None" = None) -> float | None:
    """Compute 1 - Var(R - V) / Var(R) over unmasked tokens; pass the values predicted *before* the critic's update.

    1 is perfect, 0 no better than a constant, negative worse than a constant. Returns None (undefined) if there are no returns or they
    are constant up to the rounding of their dtype. With ``group`` it covers all ranks of the group, and every rank must call it.
    """
    mask = mask.bool()
    residual = _masked(returns, mask).double() - _masked(values, mask).double()
    _, mean, variance = masked_moments(returns, mask, group)
    _, _, unexplained = masked_moments(residual, mask, group)
    mean_square, total, rest = torch.stack([mean.square() + variance, variance, unexplained]).tolist()
    rounding = 4.0 * torch.finfo(returns.dtype).eps
    if total <= rounding**2 * mean_square:
        return None
    return 1.0 - rest / total


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` where ``mask``, 0 elsewhere, in float32 or wider; ``where`` keeps NaN at masked positions out of the backward pass."""
    return torch.where(mask, x, torch.zeros((), dtype=torch.float32, device=x.device))


def _token_mean(terms: Tensor, tokens: int) -> Tensor:
    return terms.sum() / max(tokens, 1)


def _check_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0.0 <= clip_low < 1.0 or not clip_high >= 0.0:
        raise ValueError(f"0 <= clip_low < 1 and clip_high >= 0 are required, got {clip_low} and {clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
