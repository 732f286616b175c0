"""Packed (THD) self-attention and RMSNorm for machines without Transformer Engine.

Megatron-Core passes the packed query, key and value of this rank, [tokens, heads, head_dim], to ``core_attention``. The two
implementations compute causal attention within each packed sequence:

- :class:`SegmentAttention`: one scaled-dot-product call per sequence, on CPU and on GPUs; with context parallelism
  keys and values are gathered over the CP group and each rank computes its two zig-zag chunks.
- :class:`VarlenAttention`: torch's variable-length kernel, one call per micro-batch, on GPUs without context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm computed in float32 and cast back before the weight is applied, as in the Hugging Face models.

    Has the constructor signature Megatron-Core expects. The weight is marked for gradient reduction under sequence parallelism.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.hidden_size = hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (self.hidden_size,), eps=self.eps)
        return normed.to(x.dtype) * self.weight


class _GatherContext(torch.autograd.Function):
    """All-gather over the CP group along a new first dimension; the gradient is summed over the group and sliced."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.view(group.size(), *local.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        group = ctx.group
        local = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(local, grad.flatten(0, 1), group=group)
        return local, None


class SegmentAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed micro-batch, with one SDPA call per sequence (two with CP)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        self.group: dist.ProcessGroup = pg_collection.cp
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Map [tokens, heads, head_dim] each (key and value may have fewer heads) to [tokens, heads * head_dim]."""
        lengths = packed_seq_params.padded_lengths
        world = self.group.size()
        if world == 1:
            pieces = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
            out = [_attend(q, k, v, None, self.scale) for q, k, v in pieces]
        else:
            out = self._attend_zigzag(query, key, value, [length // world for length in lengths])
        return torch.cat(out).flatten(1)

    def _attend_zigzag(self, query: Tensor, key: Tensor, value: Tensor, local_lengths: list[int]) -> list[Tensor]:
        """Compute chunks r and 2 CP - 1 - r of each sequence against all keys up to the end of the chunk."""
        world, rank = self.group.size(), self.group.rank()
        both = _GatherContext.apply(torch.stack((key, value)), self.group)
        out = []
        for q, kv in zip(query.split(local_lengths), both.split(local_lengths, dim=2), strict=True):
            chunk = q.shape[0] // 2
            # [CP, 2, 2 chunks, ...]: rank r's halves are chunks r and 2 CP - 1 - r, so the second halves come reversed
            first, second = kv[:, :, :chunk], kv[:, :, chunk:]
            ordered = torch.cat((first.transpose(0, 1).flatten(1, 2), second.flip(0).transpose(0, 1).flatten(1, 2)), dim=1)
            for half, index in ((q[:chunk], rank), (q[chunk:], 2 * world - 1 - rank)):
                end = (index + 1) * chunk
                position = torch.arange(index * chunk, end, device=q.device)
                mask = position[:, None] >= torch.arange(end, device=q.device)[None]
                out.append(_attend(half, ordered[0, :end], ordered[1, :end], mask, self.scale))
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Run SDPA over one sequence, [tokens, heads, head_dim]; causal if ``mask`` is None."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


class VarlenAttention(torch.nn.Module):
    """Causal attention of a whole packed micro-batch in one call of torch's variable-length kernel (CUDA only)."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any) -> None:
        super().__init__()
        self.scale: float | None = kwargs.get("softmax_scale")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Map [tokens, heads, head_dim] each to [tokens, heads * head_dim]."""
        from torch.nn.attention.varlen import varlen_attn

        offsets, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        out = varlen_attn(
            query,
            key,
            value,
            offsets,
            offsets,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1, 0),  # causal: unlimited to the left, none to the right
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
        return out.flatten(1)
