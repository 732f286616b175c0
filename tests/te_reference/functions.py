"""References of Transformer Engine's norms, matrix products, rotary embedding and optimizer kernels.

Arguments and results are those of the functions of ``transformer_engine_torch``. Operands keep their precision; sums are in float32,
as in the kernels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.te_reference.arguments import dtype_of, half, peek, refuse, require_contiguous


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: Any, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """Return (norm [rows, hidden], None, reciprocal root mean squares [rows] float32)."""
    del sm_margin
    refuse(quantizer=quantizer)
    require_contiguous("rmsnorm_fwd", x, weight)
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    result = x.float() * scale[:, None] * (weight.float() + float(zero_centered))
    result = result.to(dtype_of(dtype))
    return (result if out is None else out.copy_(result)), None, scale


def rmsnorm_bwd(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight``. ``scale``: from the forward pass."""
    del sm_margin
    normed = x.float() * scale[:, None]
    weighted = gradient.float() * (weight.float() + float(zero_centered))
    of_x = scale[:, None] * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (gradient.float() * normed).sum(0).to(weight.dtype)


ROUND_TO_TF32 = [False]
"""Whether float32 operands of matrix products are rounded to TF32, as Transformer Engine has cuBLAS do it."""


def _operand(x: Tensor) -> Tensor:
    if ROUND_TO_TF32[0] and x.dtype == torch.float32:
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return x.float()


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
    """Multiply in cuBLAS's column-major order: for row-major tensors ``op(b) @ op(a)``.

    Layouts: "TN" is the forward pass x Wᵀ (``a`` the weight), "NN" the gradient of x, "NT" the weight's. ``bias`` is added, or in a
    backward pass (``grad``) replaced by its gradient, the sum of ``b`` over rows. ``accumulate`` adds to ``out``.

    Returns:
        (product, gradient of the bias or None, None, ``extra_output``).
    """
    del use_split_accumulator, bulk_overlap
    refuse(quantizer=quantizer, gelu=gelu or None, gelu_in=gelu_in, comm_overlap=comm_overlap, comm_type=comm_type)
    require_contiguous("generic_gemm", a, b)
    assert workspace.dtype == torch.uint8 and workspace.numel() == workspace_size and workspace.device == a.device
    first, second = _operand(b.flatten(0, -2)), _operand(a.flatten(0, -2))
    product = ((first.T if transpose_b else first) @ (second.T if transpose_a else second)) * alpha
    if bias is not None and not grad:
        assert bias.dtype == dtype_of(bias_dtype)
        product = product + bias.float()
    kind = dtype_of(dtype) if dtype is not None else a.dtype if out is None else out.dtype
    of_bias = b.flatten(0, -2).float().sum(0).to(kind) if bias is not None and grad else None
    if not transpose_b:
        product = product.view(*b.shape[:-1], product.shape[-1])
    if out is None:
        assert not accumulate, "there is nothing to accumulate to"
        return product.to(kind), of_bias, None, extra_output
    assert (out.shape, out.dtype) == (product.shape, kind), f"the product is {tuple(product.shape)} {kind}, the output {tuple(out.shape)}"
    out.copy_(out.float() * (1.0 if beta is None else beta) + product if accumulate else product)
    return out, of_bias, None, extra_output


def te_general_grouped_gemm(
    a: list[Tensor],
    transpose_a: bool,
    b: list[Tensor],
    transpose_b: bool,
    out: list[Tensor],
    dtype: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: list[Tensor],
    grad: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[Tensor]:
    """Multiply the operands of each group as :func:`generic_gemm` does. A group without rows writes zeros, unless it accumulates.

    ``single_output``: the only tensor of ``out`` has the rows of all groups; the extension finds each group's from the sizes of its
    operands, one after another. ``m_splits``: the rows of each group, which the extension does not read. Returns ``bias``.
    """
    del use_split_accumulator, sm_count
    refuse(gelu_in=[x for x in gelu_in if x.numel()] or None, bias=[x for x in bias if x.numel()] or None)
    assert len(a) == len(b) == len(m_splits) == len(bias) == len(gelu_in)
    rows = [x.shape[-1] if transpose_b else x.shape[0] for x in b]
    targets = list(out[0].split(rows)) if single_output else out
    for first, second, target in zip(a, b, targets, strict=True):
        if first.numel() == 0 or second.numel() == 0:
            if not accumulate:
                target.zero_()
            continue
        fixed = (first, transpose_a, second, transpose_b, target, None, dtype, None, bias_dtype, False, None, grad)
        generic_gemm(*fixed, workspaces[0], workspace_size, accumulate, False, beta=1.0 if accumulate else 0.0)
    return bias


def _angles(freqs: Tensor, cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Angles of the tokens of a packed tensor [tokens, 1, rotated dimensions], chunks r and 2 CP - 1 - r of each sequence."""
    offsets = [offset // cp_size for offset in peek(cu_seqlens)]
    rows = []
    for begin, end in pairwise(offsets):
        length = end - begin
        if cp_size == 1:
            rows.append(freqs[:length])
            continue
        chunk, last = length // 2, length * cp_size
        rows += [freqs[cp_rank * chunk : (cp_rank + 1) * chunk], freqs[last - (cp_rank + 1) * chunk : last - cp_rank * chunk]]
    return torch.cat(rows).flatten(1)[:, None]


def _rotary(
    x: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    layout: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
    *,
    transposed: bool,
) -> Tensor:
    refuse(start_positions=start_positions, interleaved=interleaved or None)
    assert layout.name == "NVTE_THD" and cu_seqlens is not None, f"{layout} has no reference: packed sequences only"
    assert freqs.dtype == torch.float32 and cu_seqlens.dtype == torch.int32
    angles = _angles(freqs, cu_seqlens, cp_size, cp_rank)
    assert angles.shape[0] == x.shape[0], f"offsets of {angles.shape[0]} tokens for {x.shape[0]}"
    turned, kept = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
    first, second = (turned * angles.sin() if transposed else turned).chunk(2, -1)
    around = torch.cat((second, -first), -1) if transposed else torch.cat((-second, first), -1) * angles.sin()
    return torch.cat(((turned * angles.cos() + around).to(x.dtype), kept), -1)


def fused_rope_forward(x: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    """Rotate [tokens, heads, head_dim] by angles [positions, 1, 1, rotated dimensions]; further dimensions stay."""
    return _rotary(x, freqs, *rest, transposed=False)


def fused_rope_backward(gradient: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    """Apply the transposed rotation to the gradient."""
    return _rotary(gradient, freqs, *rest, transposed=True)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Write ``lists[0]`` times ``scale`` to ``lists[1]``, casting; not finite values set ``overflow``."""
    del chunk
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        overflow.copy_(torch.maximum(overflow, (~source.isfinite().all()).to(overflow.dtype)))


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool | None = None) -> tuple[Tensor, Tensor]:
    """Return the norm [1] over all tensors, and the norm of each [n] or an empty tensor."""
    del chunk, overflow
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm()[None], norms if per_tensor else norms[:0]


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update in place: lists of gradients, parameters, first and second moments, and main parameters where those are apart."""
    del chunk, overflow
    assert decoupled == 1, "only AdamW has a reference"
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, *main in zip(*lists, strict=True):
        assert all(x.dtype == torch.float32 for x in (first, second, *main))
        current = main[0] if main else parameter
        first.mul_(beta1).add_(gradient.float(), alpha=1 - beta1)
        second.mul_(beta2).add_(gradient.float().square(), alpha=1 - beta2)
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + eps) + weight_decay * current.float()
        current.copy_(current.float() - lr * update)
        if main:
            parameter.copy_(current)


def convert_thd_to_bshd(packed: Tensor, cu_seqlens: Tensor, batch: int, longest: int) -> Tensor:
    """Pad packed sequences [tokens, ...] with zeros: [batch, longest, ...]."""
    require_contiguous("convert_thd_to_bshd", packed)
    offsets = peek(cu_seqlens)
    assert len(offsets) == batch + 1
    result = packed.new_zeros((batch, longest, *packed.shape[1:]))
    for row, (begin, end) in enumerate(pairwise(offsets)):
        result[row, : end - begin] = packed[begin:end]
    return result


def convert_bshd_to_thd(padded: Tensor, cu_seqlens: Tensor, tokens: Any) -> Tensor:
    """Pack padded sequences: the inverse. The extension takes ``tokens`` as an integer, for which the host waits."""
    require_contiguous("convert_bshd_to_thd", padded)
    offsets = peek(cu_seqlens)
    result = padded.new_zeros((int(tokens), *padded.shape[2:]))
    for row, (begin, end) in enumerate(pairwise(offsets)):
        result[begin:end] = padded[row, : end - begin]
    return result


def thd_read_half_tensor(x: Tensor, cu_seqlens: Tensor, which: int) -> Tensor:
    """Return the first (0) or second (1) half of each sequence of [tokens, ...]."""
    require_contiguous("thd_read_half_tensor", x)
    assert x.dim() == 3 and x[0].numel() * x.element_size() % 16 == 0, "the kernel moves 16 bytes at a time"
    return x[half(cu_seqlens, which)]


__all__ = [
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "fused_rope_backward",
    "fused_rope_forward",
    "generic_gemm",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "te_general_grouped_gemm",
    "thd_read_half_tensor",
]
