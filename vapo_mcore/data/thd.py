"""The THD layout: the only module that handles padding for TP and CP and the zig-zag split over context-parallel ranks.

Frames used below, all flat over the sequences of one micro-batch:

* *packed* ``[num_tokens]``: the real tokens only, sequence after sequence (what every other module handles);
* *padded* ``[num_padded_tokens]``: pads trail their sequence, so that causal attention never shows a real token a pad;
* *local* ``[num_local_tokens]``: this context-parallel rank's part of the padded frame, what Megatron-Core is fed.

Padding rule: with CP > 1 each sequence is padded to a multiple of ``2 * cp``; the total is padded to a multiple of
``tp * 2 * cp`` (``tp`` when cp = 1) by lengthening the last sequence, so that sequence parallelism divides each rank's part.
``pad_to`` requests a larger total (pipeline schedules that need equal shapes use it); the difference becomes short sequences of padding,
over which attention is cheap.

Split rule (Megatron-Core and Transformer Engine, load-balanced causal attention): a padded sequence of L tokens is cut into
``2 * cp`` chunks; rank r holds chunk r, then chunk ``2 * cp - 1 - r``; ranks hold their parts sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.data.ragged import cumulative, segment_ids, segment_positions

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def pad_multiples(context_parallel_size: int, tensor_parallel_size: int) -> tuple[int, int]:
    """Return the padding multiples in tokens: (of each sequence, of the total)."""
    sequence = 2 * context_parallel_size if context_parallel_size > 1 else 1
    return sequence, sequence * tensor_parallel_size


FEWEST_TOKENS = 2
"""Tokens of a dummy, at least. With one token and one key-value head Transformer Engine 2.11 refuses the strides of the values."""
PAD_SEQUENCE_TOKENS = 512
"""Approximate length of a sequence of pads, a multiple of the total's multiple. Short ones keep attention over pads linear."""


def _pad_sequences(needed: int, pad_to: int | None, multiple: int, *, dummy: bool) -> Tensor:
    """Return the lengths of the sequences of pads that fill a layout, int64; at least one for a layout without sequences."""
    target = max(pad_to or needed, max(multiple, FEWEST_TOKENS) if dummy else 0)
    if target < needed or (target - needed) % multiple:
        raise ValueError(f"cannot pad {needed} tokens to {pad_to}: it must not be below and the difference a multiple of {multiple}")
    size = max(1, PAD_SEQUENCE_TOKENS // multiple) * multiple
    whole, rest = divmod(target - needed, size)
    return torch.tensor([size] * whole + [rest] * (rest > 0), dtype=torch.int64)


class ThdLayout:
    """Padded and split view of the sequences of one micro-batch, seen from one context-parallel rank.

    Args:
        lengths: tokens of each sequence (prompt + response), each at least 1. Empty: the layout of an empty micro-batch, one
            dummy sequence of pads as long as the pad multiple, with ``num_tokens`` 0.
        context_parallel_size, context_parallel_rank: degree and rank of the context-parallel group.
        tensor_parallel_size: degree of tensor (and sequence) parallelism.
        pad_to: padded tokens in all, at least what the sequences need and a multiple of the total's multiple; None: no more
            than needed.
        device: where the index tensors live; tensors given to the methods must be on it.

    Raises:
        ValueError: a length below 1, a rank outside the group, or a ``pad_to`` that cannot be met.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        *,
        context_parallel_size: int = 1,
        context_parallel_rank: int = 0,
        tensor_parallel_size: int = 1,
        pad_to: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 0 <= context_parallel_rank < context_parallel_size:
            raise ValueError(f"context-parallel rank {context_parallel_rank} is outside a group of {context_parallel_size}")
        real = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if real.numel() and int(real.min()) < 1:
            raise ValueError(f"a sequence of {int(real.min())} tokens cannot be laid out; every sequence needs at least 1")
        self.context_parallel_size = context_parallel_size
        self.context_parallel_rank = context_parallel_rank
        self.device = torch.device(device)
        sequence_multiple, total_multiple = pad_multiples(context_parallel_size, tensor_parallel_size)
        padded = (real + sequence_multiple - 1).div(sequence_multiple, rounding_mode="floor") * sequence_multiple
        if real.numel():
            padded[-1] += -int(padded.sum()) % total_multiple
        padded = torch.cat([padded, _pad_sequences(int(padded.sum()), pad_to, total_multiple, dummy=not real.numel())])
        self._arguments: dict[str, Any] = {
            "context_parallel_size": context_parallel_size,
            "context_parallel_rank": context_parallel_rank,
            "tensor_parallel_size": tensor_parallel_size,
            "device": device,
        }
        self.is_dummy = real.numel() == 0
        self.num_tokens = int(real.sum())
        self.num_padded_tokens = int(padded.sum())
        self.num_local_tokens = self.num_padded_tokens // context_parallel_size
        self.max_seqlen = int(padded.max())
        self.lengths_list: list[int] = real.tolist()
        self.padded_lengths_list: list[int] = padded.tolist()
        self._build_indices(real, padded)

    def _build_indices(self, real: Tensor, padded: Tensor) -> None:
        """Build all index tensors on the host with a few vector operations, then copy each to the device once."""
        cp, rank = self.context_parallel_size, self.context_parallel_rank
        count = real.numel()
        # Sequences of pads alone, a dummy's included, are sequences of length 0 here.
        real = torch.cat([real, real.new_zeros(padded.numel() - count)])
        starts, starts_padded = cumulative(real), cumulative(padded)
        # Local frame -> padded frame. With one rank the "two chunks" are the whole sequence.
        owner = segment_ids(padded // cp)
        offset = segment_positions(padded // cp)
        chunk = (padded // (2 * cp) if cp > 1 else padded)[owner]
        second = offset >= chunk
        position = torch.where(second, (2 * cp - 1 - rank) * chunk + offset - chunk, rank * chunk + offset)
        is_real = position < real[owner]
        # Packed frame -> all ranks' local frames laid end to end (what an all-gather over the group returns).
        token_owner, token_position = segment_ids(real), segment_positions(real)
        token_chunk = (padded // (2 * cp) if cp > 1 else padded)[token_owner]
        number = token_position // token_chunk
        holder = torch.minimum(number, 2 * cp - 1 - number)
        in_holder = starts_padded[token_owner] // cp + token_position - number * token_chunk + (number >= cp) * token_chunk

        def put(x: Tensor) -> Tensor:
            return x.to(self.device, non_blocking=True)

        self.lengths, self.padded_lengths = put(real[:count]), put(padded)
        self._host_offsets = starts_padded.to(torch.int32)
        self.cu_seqlens, self.cu_seqlens_padded = put(starts[: count + 1]), put(self._host_offsets)
        self.local_index = put(starts_padded[owner] + position)
        self.position_ids = put(position)
        self.local_token_mask = put(is_real)
        self.unshard_index = put(holder * self.num_local_tokens + in_holder)
        self._real_slots = put(is_real.nonzero().squeeze(1))
        self._real_sources = put((starts[owner] + position)[is_real])
        self._first, self._last = put(starts[:count]), put(starts[1 : count + 1] - 1)

    def with_padding(self, pad_to: int) -> ThdLayout:
        """Return a layout of the same sequences with ``pad_to`` padded tokens."""
        return self if pad_to == self.num_padded_tokens else ThdLayout(self.lengths_list, pad_to=pad_to, **self._arguments)

    @property
    def num_sequences(self) -> int:
        """Real sequences: 0 for a dummy, although Megatron then sees one sequence of pads."""
        return len(self.lengths_list)

    @property
    def local_cu_seqlens(self) -> Tensor:
        """int64 ``[padded sequences + 1]``: bounds of this rank's part of each sequence, in the local frame."""
        return self.cu_seqlens_padded.long() // self.context_parallel_size

    @property
    def last_token_index(self) -> Tensor:
        """int64 ``[num_sequences]``: packed index of each sequence's last token."""
        return self._last

    def shard(self, x: Tensor, fill: float | bool) -> Tensor:
        """Select this rank's tokens: packed ``[num_tokens, ...]`` to local ``[num_local_tokens, ...]``, with ``fill`` at the pads."""
        self._expect(x, self.num_tokens)
        local = x.new_full((self.num_local_tokens, *x.shape[1:]), fill)
        return local.index_copy_(0, self._real_slots, x.index_select(0, self._real_sources))

    def unshard(self, x_all: Tensor) -> Tensor:
        """Convert the local tensors of all ranks in rank order, ``[cp * num_local_tokens, ...]``, to packed ``[num_tokens, ...]``."""
        self._expect(x_all, self.num_padded_tokens)
        return x_all.index_select(0, self.unshard_index)

    def gather(self, x_local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Gather local ``[num_local_tokens, ...]`` to packed ``[num_tokens, ...]``, the same on every rank of ``group``.

        A collective over the context-parallel group when cp > 1 (``group`` may be None otherwise). Not differentiable: detaches its
        input.
        """
        self._expect(x_local, self.num_local_tokens)
        x_local = x_local.detach().contiguous()
        if self.context_parallel_size == 1:
            return self.unshard(x_local)
        if group is None:
            raise ValueError("gathering over context parallelism needs the process group")
        # Send bool as bytes: not every backend supports bool.
        sent = x_local.view(torch.uint8) if x_local.dtype == torch.bool else x_local
        received = sent.new_empty((self.num_padded_tokens, *sent.shape[1:]))
        dist.all_gather_into_tensor(received, sent, group=group)
        return self.unshard(received.view(x_local.dtype))

    def shift_left(self, x: Tensor, fill: float | bool) -> Tensor:
        """Shift token-aligned values to output-aligned within each sequence: ``y[i] = x[i + 1]``, the last entry is ``fill``."""
        self._expect(x, self.num_tokens)
        return torch.roll(x, -1, dims=0).index_fill_(0, self._last, fill)

    def shift_right(self, x: Tensor, fill: float | bool) -> Tensor:
        """Shift output-aligned values to token-aligned within each sequence: ``y[i] = x[i - 1]``, the first entry is ``fill``."""
        self._expect(x, self.num_tokens)
        return torch.roll(x, 1, dims=0).index_fill_(0, self._first, fill)

    def packed_seq_params(self, *, fused_rope: bool = True) -> PackedSeqParams:
        """Return Megatron-Core's description of the padded frame (global offsets; its rotary code divides them by CP itself).

        Offsets are those of the padded frame: pads trail their sequence and are ordinary, ignored tokens of it, so attention kernels need
        no support for gaps and the causal mask keeps real tokens exact. Transformer Engine needs ``*_padded`` offsets only with context
        parallelism. It compares them with the others on the device, so the host waits twice in every layer; they are omitted otherwise.

        ``fused_rope``: a kernel applies the rotary embedding from offsets on the device. Without it Megatron reads the padded offsets as a
        list in every layer; they stay on the host then, so that the host does not wait for the device.

        The result also has ``padded_lengths``, a list for ``SegmentAttention``, which reads lengths without waiting for the device.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        offsets: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), self.cu_seqlens_padded)
        if not fused_rope:
            offsets |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), self._host_offsets)
        elif self.context_parallel_size > 1:
            offsets |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), self.cu_seqlens_padded)
        params = PackedSeqParams(qkv_format="thd", max_seqlen_q=self.max_seqlen, max_seqlen_kv=self.max_seqlen, **offsets)
        params.padded_lengths = self.padded_lengths_list  # type: ignore[attr-defined]
        return params

    @staticmethod
    def _expect(x: Tensor, size: int) -> None:
        if x.shape[0] != size:
            raise ValueError(f"a tensor of {x.shape[0]} tokens was given where the layout has {size}")
