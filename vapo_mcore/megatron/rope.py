"""Rotary position embeddings of a Hugging Face architecture: inverse frequencies, attention scale, and the table of angles.

Megatron-Core's ``RotaryEmbedding`` computes unscaled angles. Its own llama3 scaling has fixed constants, and its ``YarnRotaryEmbedding``
needs a CUDA device and multiplies queries and keys by the attention factor only where rotary kernels are not fused. Here the scaling is
in the inverse frequencies and in the softmax scale, so that every attention implementation gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture


def inverse_frequencies(architecture: ModelArchitecture, plain: Tensor) -> Tensor:
    """Apply the rotary scaling of the HF config.

    Args:
        plain: inverse frequencies without scaling, [head_dim / 2] float32.

    Returns: inverse frequencies, same shape, dtype and device.
    """
    scaling = architecture.rope_scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "llama3":
        return _llama3(scaling, plain)
    return _yarn(scaling, plain, architecture.rope_theta)


def _llama3(scaling: Mapping[str, Any], plain: Tensor) -> Tensor:
    """Divide long wavelengths by ``factor``, keep short ones, interpolate between (Llama 3.1 reference code)."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * torch.pi / plain
    blend = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(scaling: Mapping[str, Any], plain: Tensor, theta: float) -> Tensor:
    """Apply NTK-by-parts interpolation (YaRN, arXiv:2309.00071, section 3.2) with Megatron-Core's correction range and ramp."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_find_correction_range,
        _yarn_linear_ramp_mask,
    )

    low, high = _yarn_find_correction_range(
        float(scaling.get("beta_fast") or 32),
        float(scaling.get("beta_slow") or 1),
        2 * plain.numel(),
        theta,
        int(scaling["original_max_position_embeddings"]),
        bool(scaling.get("truncate", True)),
    )
    interpolated = _yarn_linear_ramp_mask(low, high, plain.numel(), device=plain.device)
    return plain / float(scaling["factor"]) * interpolated + plain * (1 - interpolated)


def softmax_scale(architecture: ModelArchitecture) -> float | None:
    """Return the scale of the attention logits, or None for 1 / sqrt(head_dim).

    YaRN multiplies the rotated queries and keys by an attention factor (arXiv:2309.00071, Eq. 21), so their products by its square. The
    scale of the softmax holds it, because Megatron-Core's fused rotary kernel for packed sequences drops it without an error.
    """
    scaling = architecture.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return None
    return _attention_factor(scaling) ** 2 / math.sqrt(architecture.head_dim)


def _attention_factor(scaling: Mapping[str, Any]) -> float:
    """Return the factor of the rotated queries and keys: as given, or from ``mscale`` and ``mscale_all_dim``, or 0.1 ln(factor) + 1."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    factor = float(scaling["factor"])
    given, mscale, mscale_all_dim = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if mscale and mscale_all_dim:
        return magnitude(float(mscale)) / magnitude(float(mscale_all_dim))
    return magnitude(1.0)


class RotaryTable:
    """Rotary angles of one chunk, [longest sequence so far, 1, 1, head_dim] float32.

    Replaces Megatron's ``RotaryEmbedding.forward``, which caches a table for each of the last 32 lengths on the device. Packed
    micro-batches have sequences of any length, so that cache would hold up to 32 times the memory of the longest.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self.make = make
        self.table: Tensor | None = None

    def __call__(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        assert packed_seq and offset == 0, "unpacked sequences would need the angles of a context-parallel rank's share"
        if self.table is None or self.table.shape[0] < max_seq_len:
            self.table = self.make(max_seq_len)
        return self.table[:max_seq_len]
