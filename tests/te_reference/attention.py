"""References of Transformer Engine's attention kernels on packed sequences: cuDNN's fused attention, and the parts of its ring exchange.

The kernels compute scores and softmax in float32 and keep the logarithm of each row's sum, float32 [tokens, heads, 1], for the backward
pass; offsets with and without padding are separate arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.te_reference.arguments import half, peek, refuse, require_contiguous


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    dropout: float,
    num_heads: int,
    num_groups: int,
    longest_q: int,
    longest_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_left: int,
    window_right: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> Any:
    """Return the backend that the extension chooses on Hopper with cuDNN 9 for packed sequences of 16-bit types, or none.

    Its conditions, of which those that a model here can meet or miss: 16-bit types, head dimensions of a multiple of 8 up to 256, causal
    masks of padded sequences, no bias, no window.
    """
    import transformer_engine_torch as tex

    del is_training, longest_q, longest_kv, cuda_graph
    fits = (
        q_dtype.name in ("kBFloat16", "kFloat16")
        and q_dtype == kv_dtype
        and "THD" in qkv_layout.name.replace("T3HD", "THD").replace("TH3D", "THD")
        and bias_type.name == "NVTE_NO_BIAS"
        and mask_type.name in ("NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_MASK")
        and softmax_type.name == "NVTE_VANILLA_SOFTMAX"
        and dropout == 0.0
        and num_heads % num_groups == 0
        and all(size % 8 == 0 and size <= 256 for size in (head_dim_qk, head_dim_v))
        and window_left == -1
        and window_right in (-1, 0)
        and not return_max_logit
    )
    backends = tex.NVTE_Fused_Attn_Backend
    return backends.NVTE_F16_arbitrary_seqlen if fits else backends.NVTE_No_Backend


def _sequences(real: Tensor, padded: Tensor | None) -> Iterator[slice]:
    """Where each sequence's real tokens are."""
    lengths = peek(real)
    starts = peek(real if padded is None else padded)
    for number, start in enumerate(starts[:-1]):
        yield slice(start, start + lengths[number + 1] - lengths[number])


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Scaled scores [heads, queries, keys] float32 of one sequence; causal from the first token of both."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), _for_all_heads(k, q)) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _for_all_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _of_groups(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient [tokens, heads, dim] over the heads that share a head of ``x``."""
    return gradient.view(x.shape[0], x.shape[1], -1, x.shape[2]).sum(2)


def _apart(qkv_layout: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors that the kernel reads as contiguous; those of interleaved layouts have the strides of their common memory."""
    assert "T" in qkv_layout.name, f"{qkv_layout} has no reference: packed sequences only"
    return tensors if qkv_layout.name == "NVTE_THD_THD_THD" else ()


def _causal(mask: Any) -> bool:
    assert mask.name in ("NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_MASK"), mask
    return bool(mask.name == "NVTE_PADDING_CAUSAL_MASK")


def fused_attn_fwd(
    longest_q: int,
    longest_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    window: Any,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    nominal_dtype: Any,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Tensor | None,
    softmax_offset: Tensor | None,
    generator: Any,
    elements_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Return [output [tokens, heads, dim], log-sums [tokens, heads, 1] float32, random state]; pads are zero."""
    del is_training, fast_zero_fill, bias_type, softmax_type, nominal_dtype, elements_per_thread, cuda_graph
    refuse(page_table_k=page_table_k, page_table_v=page_table_v, s_quantizer=s_quantizer, o_quantizer=o_quantizer, bias=bias)
    refuse(softmax_offset=softmax_offset, generator=generator, return_max_logit=return_max_logit or None, dropout=dropout or None)
    assert tuple(window) in ((-1, -1), (-1, 0)), window
    require_contiguous("fused_attn_fwd", *_apart(qkv_layout, q, k, v))
    out, sums = torch.zeros_like(q), torch.zeros((*q.shape[:2], 1), dtype=torch.float32, device=q.device)
    pairs = zip(_sequences(cu_seqlens_q, cu_seqlens_q_padded), _sequences(cu_seqlens_kv, cu_seqlens_kv_padded), strict=True)
    for queries, keys in pairs:
        assert queries.stop - queries.start <= longest_q and keys.stop - keys.start <= longest_kv
        scores = _scores(q[queries], k[keys], scale, _causal(mask_type))
        total = scores.logsumexp(-1, keepdim=True)
        out[queries] = torch.einsum("hqk,khd->qhd", (scores - total).exp(), _for_all_heads(v[keys], q)).to(q.dtype)
        sums[queries] = total.transpose(0, 1)
    return [out, sums, torch.zeros(2, dtype=torch.int64, device=q.device)]


def fused_attn_bwd(
    longest_q: int,
    longest_kv: int,
    scale: float,
    dropout: float,
    fast_zero_fill: bool,
    qkv_layout: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    window: Any,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gradient: Tensor,
    nominal_dtype: Any,
    gradient_dtype: Any,
    auxiliary: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients of q, k and v, and None for those of a bias and of a softmax offset.

    With context parallelism ``out`` and the log-sums are those over all keys, and ``k`` and ``v`` some of them.
    """
    del longest_q, longest_kv, fast_zero_fill, bias_type, softmax_type, window, deterministic
    del nominal_dtype, gradient_dtype, cuda_graph
    refuse(s_quantizer=s_quantizer, dp_quantizer=dp_quantizer, dqkv_quantizer=dqkv_quantizer, dropout=dropout or None)
    require_contiguous("fused_attn_bwd", gradient, out, *_apart(qkv_layout, q, k, v))
    sums = auxiliary[0]
    assert sums.dtype == torch.float32 and sums.shape == (*q.shape[:2], 1), (sums.dtype, sums.shape)
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (q, k, v))
    pairs = zip(_sequences(cu_seqlens_q, cu_seqlens_q_padded), _sequences(cu_seqlens_kv, cu_seqlens_kv_padded), strict=True)
    for queries, keys in pairs:
        shares = (_scores(q[queries], k[keys], scale, _causal(mask_type)) - sums[queries].transpose(0, 1)).exp()
        of_out = gradient[queries].float()
        of_v[keys] = _of_groups(torch.einsum("hqk,qhd->khd", shares, of_out), v[keys]).to(v.dtype)
        of_shares = torch.einsum("qhd,khd->hqk", of_out, _for_all_heads(v[keys], q))
        mean = (of_out * out[queries].float()).sum(-1).transpose(0, 1)[..., None]
        of_scores = shares * (of_shares - mean) * scale
        of_q[queries] = torch.einsum("hqk,khd->qhd", of_scores, _for_all_heads(k[keys], q)).to(q.dtype)
        of_k[keys] = _of_groups(torch.einsum("hqk,qhd->khd", of_scores, q[queries].float()), k[keys]).to(k.dtype)
    return [of_q, of_k, of_v, None, None]


def thd_second_half_lse_correction(sums: Tensor, of_step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    """Add a step's log-sums [heads, tokens / 2] to those of the second halves in ``sums`` [heads, tokens]."""
    assert packed and sums.dtype == of_step.dtype == torch.float32
    second = half(cu_seqlens, 1)
    sums[:, second] = torch.logaddexp(sums[:, second], of_step)


def thd_read_second_half_lse(sums: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    """Return the log-sums of the second halves, [heads, length]."""
    assert packed
    result = sums[:, half(cu_seqlens, 1)]
    assert result.shape[1] == length
    return result


def thd_out_correction(
    out: Tensor, of_step: Tensor, sums: Tensor, sums_of_step: Tensor, cu_seqlens: Tensor, second: bool, packed: bool
) -> None:
    """Add a step's output [tokens or tokens / 2, heads, dim] with its share of the softmax, to all tokens or to second halves."""
    assert packed
    if not second:
        share = (sums_of_step - sums).exp().transpose(0, 1)[..., None]
        out.copy_(out.float() + of_step.float() * share)
        return
    rows = half(cu_seqlens, 1)
    share = (sums_of_step - sums[:, rows]).exp().transpose(0, 1)[..., None]
    out[rows] = (out[rows].float() + of_step.float() * share).to(out.dtype)


def thd_grad_correction(gradient: Tensor, of_step: Tensor, cu_seqlens: Tensor, first: str, second: str) -> None:
    """Copy or add a step's gradient to the first and second halves; "none" leaves one alone, and the step has only the other."""
    both = "none" not in (first, second)
    for which, how in enumerate((first, second)):
        if how == "none":
            continue
        rows = half(cu_seqlens, which)
        part = of_step[rows] if both else of_step
        gradient[rows] = part if how == "copy" else gradient[rows] + part


__all__ = [
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_fused_attn_backend",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]
