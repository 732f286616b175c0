"""A categorical value head trained by cross-entropy: HL-Gauss (Imani and White, arXiv:1806.04613; Farebrother et al., arXiv:2403.03950).

[low, high] is divided into bins of equal width. The target of a return is a Gaussian around it, integrated over each bin and normalised
to its mass within the bounds. The value is the expectation of the bins' centres under the softmax of the logits.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class Bins(Protocol):
    """``bins`` cells of equal width on [low, high]; sigma: standard deviation of the Gaussian, in widths."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def bins(self) -> int: ...
    @property
    def sigma(self) -> float: ...


def centres(support: Bins, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the centre of each bin, [bins]."""
    width = (support.high - support.low) / support.bins
    numbers = torch.arange(support.bins, device=device, dtype=torch.float64)
    return (support.low + (numbers + 0.5) * width).to(dtype)


def gaussian_histogram(returns: Tensor, support: Bins) -> Tensor:
    """Compute the targets, float32 [T, bins] (arXiv:2403.03950, section 3.1); rows sum to 1. returns: float [T], clamped to [low, high]."""
    width = (support.high - support.low) / support.bins
    edges = support.low + torch.arange(support.bins + 1, device=returns.device, dtype=torch.float64) * width
    clamped = returns.detach().double().clamp(support.low, support.high)
    below = torch.special.erf((edges - clamped[:, None]) / (math.sqrt(2.0) * support.sigma * width))
    return (below.diff(dim=-1) / (below[:, -1:] - below[:, :1])).float()


def expected_values(logits: Tensor, support: Bins) -> Tensor:
    """Compute the values sum_k softmax(logits)_k c_k, float32 [T], from logits, float [T, bins]."""
    return logits.float().softmax(-1) @ centres(support, logits.device)


def histogram_value_terms(logits: Tensor, returns: Tensor, mask: Tensor, support: Bins) -> Tensor:
    """Compute the cross-entropy -sum_k p_k log softmax(logits)_k, p the histogram of the return; float32 [T].

    logits: float [T, bins]; returns: float [T]; mask: bool [T]. Masked tokens have term 0 and gradient 0.
    """
    mask = mask.bool()
    zero = torch.zeros((), dtype=torch.float32, device=logits.device)
    clean = torch.where(mask[:, None], logits.float(), zero)
    target = gaussian_histogram(torch.where(mask, returns.detach(), zero), support)
    return torch.where(mask, -(target * clean.log_softmax(-1)).sum(-1), zero)


def outside(returns: Tensor, mask: Tensor, support: Bins) -> Tensor:
    """Mark unmasked returns outside [low, high], which these bins cannot predict; bool [T]. Tolerates rounding (1e-6 of the range)."""
    room = 1e-6 * (support.high - support.low)
    return mask.bool() & ((returns < support.low - room) | (returns > support.high + room))


def bias_of_mean(mean: float, support: Bins) -> Tensor:
    """Return the logits theta c_k with expectation ``mean``, float32 [bins]: the distribution of largest entropy with that mean.

    A mean outside the outermost centres is moved to just within them.
    """
    c = centres(support, dtype=torch.float64)
    width = (support.high - support.low) / support.bins
    mean = min(max(mean, float(c[0]) + 0.01 * width), float(c[-1]) - 0.01 * width)
    low, high = -50.0 / width, 50.0 / width
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * c).softmax(0) @ c) < mean else (low, middle)
    logits = (low + high) / 2 * c
    return (logits - logits.mean()).float()
