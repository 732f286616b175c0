"""Declarative mapping rules, and the pure tensor functions that implement each kind of rule.

A :class:`Rule` declares which Hugging Face tensors one Megatron parameter consists of, and how:

=========  =====================================================================================================
kind       the Megatron parameter
=========  =====================================================================================================
copy       the HF tensor, the same on every tensor-parallel rank (norms, row-parallel biases, scalar heads)
column     split into equal blocks of rows (column-parallel linear: HF stores ``[out, in]``)
row        split into equal blocks of columns (row-parallel linear)
qkv        q, k and v fused group by group, then split into equal blocks of rows
gated      gate and up projections, each split into blocks of rows; a rank holds ``[gate block; up block]``
gate_up    the same where HF stores both as one tensor ``[gate; up]``
vocab      rows padded with zeros to ``padded_vocab_size``, then split into equal blocks of rows
=========  =====================================================================================================

Every kind has two pairs of inverse functions: ``merge`` (HF tensors -> full Megatron tensor) and ``split``; ``shard`` (full tensor ->
block of one rank) and ``unshard``. ``load`` is ``shard(merge(...))`` that reads only the data the rank needs. Experts use the same kinds:
a ``{expert}`` placeholder in the names makes a rule an expert rule, sharded over the *expert* tensor-parallel group.

Fused QKV in Megatron-Core 0.16.1 (``SelfAttention.get_query_key_value_tensors``): the rows of each key-value group are ``[q heads of the
group, k, v]``. With fewer groups than TP ranks the fused rows are still split into equal contiguous blocks, which may end inside a group
or a head; the forward pass all-gathers the block outputs and slices out its group. The same ``shard`` handles both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.errors import ConfigError
from vapo_mcore.megatron.model import padded_vocab_size


class TensorSource(Protocol):
    """A tensor that can be read in part; ``rows`` and ``columns`` are (start, stop) pairs of its first and second dimension."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor: ...


def block(size: int, tp: int, rank: int) -> tuple[int, int]:
    """Return (start, stop) of one of ``tp`` equal blocks. Raises ConfigError unless ``size`` is divisible by ``tp``."""
    if size % tp:
        raise ConfigError(
            f"a dimension of {size} cannot be split into tensor_model_parallel_size = {tp} equal blocks; choose a divisor of {size}"
        )
    step = size // tp
    return rank * step, (rank + 1) * step


class Copy:
    """One HF tensor, replicated."""

    name = "copy"
    sharded = False
    row_blocks = False
    """Whether ``unshard`` is concatenation along rows."""
    cuts_columns = False
    """Whether ``shard`` splits the second dimension. Otherwise ``unshard`` and ``split`` only move whole rows."""

    def merge(self, tensors: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        """Merge HF tensors, in rule order, into the full Megatron tensor."""
        (only,) = tensors
        return only

    def split(self, full: Tensor, arch: ModelArchitecture) -> tuple[Tensor, ...]:
        """Split the full Megatron tensor into HF tensors, in rule order (views where possible)."""
        return (full,)

    def shard(self, full: Tensor, tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        """Return the block of TP rank ``rank``."""
        return full

    def unshard(self, shards: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        """Combine the blocks of all ranks, in rank order, into the full Megatron tensor (no copy with one rank)."""
        return shards[0]

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        """Compute ``shard(merge(sources))``, where possible reading only the data this rank needs."""
        return self.shard(self.merge([source.read() for source in sources], arch), tp, rank, arch)


class Column(Copy):
    """One HF ``[out, ...]`` tensor split along ``out``."""

    name = "column"
    sharded = True
    row_blocks = True

    def shard(self, full: Tensor, tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        start, stop = block(full.shape[0], tp, rank)
        return full[start:stop]

    def unshard(self, shards: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim=0)

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        return sources[0].read(rows=block(sources[0].shape[0], tp, rank))


class Row(Copy):
    """One HF ``[out, in]`` tensor split along ``in``."""

    name = "row"
    sharded = True
    cuts_columns = True

    def shard(self, full: Tensor, tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        start, stop = block(full.shape[1], tp, rank)
        return full[:, start:stop]

    def unshard(self, shards: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim=1)

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        return sources[0].read(columns=block(sources[0].shape[1], tp, rank))


class Vocab(Column):
    """One HF ``[vocab, hidden]`` tensor; ``shard`` adds zero rows, ``split`` removes them."""

    name = "vocab"

    def split(self, full: Tensor, arch: ModelArchitecture) -> tuple[Tensor, ...]:
        return (full[: arch.vocab_size],)

    def shard(self, full: Tensor, tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        start, stop = block(padded_vocab_size(arch.vocab_size, tp), tp, rank)
        return _pad_rows(full[start : min(stop, arch.vocab_size)], stop - start)

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        start, stop = block(padded_vocab_size(arch.vocab_size, tp), tp, rank)
        real = (min(start, arch.vocab_size), min(stop, arch.vocab_size))
        return _pad_rows(sources[0].read(rows=real), stop - start)


class Gated(Column):
    """Gate and up projections, ``[ffn, ...]`` each. The full tensor is ``[gate; up]``, and so is every rank's block of it."""

    name = "gated"
    row_blocks = False

    def merge(self, tensors: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        gate, up = tensors
        return torch.cat((gate, up), dim=0)

    def split(self, full: Tensor, arch: ModelArchitecture) -> tuple[Tensor, ...]:
        return full.chunk(2, dim=0)

    def shard(self, full: Tensor, tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        halves = full.unflatten(0, (2, -1))
        start, stop = block(halves.shape[1], tp, rank)
        return halves[:, start:stop].flatten(0, 1)

    def unshard(self, shards: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        return torch.cat([shard.unflatten(0, (2, -1)) for shard in shards], dim=1).flatten(0, 1)

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        return self.merge([source.read(rows=block(source.shape[0], tp, rank)) for source in sources], arch)


class GateUp(Gated):
    """One HF tensor ``[gate; up]`` of ``[2 ffn, ...]``, which is the full tensor."""

    name = "gate_up"

    def merge(self, tensors: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        (only,) = tensors
        return only

    def split(self, full: Tensor, arch: ModelArchitecture) -> tuple[Tensor, ...]:
        return (full,)

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        (source,) = sources
        start, stop = block(source.shape[0] // 2, tp, rank)
        ffn = source.shape[0] // 2
        return torch.cat((source.read(rows=(start, stop)), source.read(rows=(ffn + start, ffn + stop))), dim=0)


class Qkv(Column):
    """Query, key and value projections (weights or biases) fused group by group; see the module docstring."""

    name = "qkv"

    def merge(self, tensors: Sequence[Tensor], arch: ModelArchitecture) -> Tensor:
        return _fuse_groups(tensors, arch.num_key_value_heads)

    def split(self, full: Tensor, arch: ModelArchitecture) -> tuple[Tensor, ...]:
        heads_per_group = arch.num_attention_heads // arch.num_key_value_heads
        grouped = full.unflatten(0, (arch.num_key_value_heads, -1))
        sizes = [heads_per_group * arch.head_dim, arch.head_dim, arch.head_dim]
        return tuple(part.flatten(0, 1) for part in grouped.split(sizes, dim=1))

    def load(self, sources: Sequence[TensorSource], tp: int, rank: int, arch: ModelArchitecture) -> Tensor:
        if arch.num_key_value_heads % tp:  # blocks end inside a group: read everything; these tensors are small compared to the MLP
            return super(Column, self).load(sources, tp, rank, arch)
        parts = [source.read(rows=block(source.shape[0], tp, rank)) for source in sources]
        return _fuse_groups(parts, arch.num_key_value_heads // tp)


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _fuse_groups(tensors: Sequence[Tensor], groups: int) -> Tensor:
    return torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)


KINDS: dict[str, Copy] = {kind.name: kind for kind in (Copy(), Column(), Row(), Vocab(), Gated(), GateUp(), Qkv())}

DIMENSIONS = {
    "vocab": lambda arch: arch.vocab_size,
    "hidden": lambda arch: arch.hidden_size,
    "q": lambda arch: arch.num_attention_heads * arch.head_dim,
    "kv": lambda arch: arch.num_key_value_heads * arch.head_dim,
    "head": lambda arch: arch.head_dim,
    "ffn": lambda arch: arch.ffn_hidden_size,
    "gate_and_up": lambda arch: 2 * arch.ffn_hidden_size,
    "expert_ffn": lambda arch: arch.moe_ffn_hidden_size,
    "experts": lambda arch: arch.num_experts,
    "values": lambda arch: arch.value_outputs,
}
"""Names of dimensions that rules use for the shapes of HF tensors."""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter (or one per layer, or per layer and expert) and the HF tensors it consists of.

    ``mcore``: parameter names, the canonical one first (local layer spec), then the names of the same parameter in other specs
    (Transformer Engine's fused norms, grouped experts). ``hf``: ``(name, dimensions)`` of each HF tensor in ``merge`` order, with
    dimension names from :data:`DIMENSIONS`. ``{layer}`` and ``{expert}`` are placeholders for global indices; names otherwise match
    exactly. ``when``: a boolean attribute of :class:`ModelArchitecture` that enables the rule (``not name`` inverts it).
    ``tied_copy``: a second copy of a parameter that only some pipeline layouts have; it is loaded but not exported.
    """

    mcore: tuple[str, ...]
    hf: tuple[tuple[str, tuple[str, ...]], ...]
    kind: str
    when: str | None = None
    tied_copy: bool = False

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert all(dim in DIMENSIONS for _, dims in self.hf for dim in dims), self.hf

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.mcore[0]

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.mcore[0]

    def applies(self, arch: ModelArchitecture) -> bool:
        if self.when is None:
            return True
        inverted, name = self.when.startswith("not "), self.when.removeprefix("not ")
        return bool(getattr(arch, name)) != inverted
