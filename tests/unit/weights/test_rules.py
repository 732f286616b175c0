"""Each kind of rule is two inverse pairs, and gives the layouts that Megatron-Core's modules expect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.weights.models import make_arch
from vapo_mcore.errors import ConfigError
from vapo_mcore.weights.plan import plan_mapping
from vapo_mcore.weights.rules import KINDS


class InMemory:
    """A tensor source that counts the numbers it hands out."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.numbers = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        part = self.tensor if rows is None else self.tensor[rows[0] : rows[1]]
        part = part if columns is None else part[:, columns[0] : columns[1]]
        self.numbers += part.numel()
        return part


@st.composite
def cases(draw: Any) -> tuple[Any, int]:
    """An architecture with odd counts where its TP degree allows them (groups below, equal to and above TP)."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4, 5, 7, 8, 12, 16) if g % tp == 0 or tp % g == 0]))
    heads_per_group = draw(st.integers(1, 7)) if groups % tp == 0 else tp // groups * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4, 6]) if groups % tp == 0 else st.sampled_from([4, 8]))
    arch = make_arch(
        family="qwen3",
        num_layers=1,
        hidden_size=draw(st.integers(1, 3)) * 8,
        ffn_hidden_size=draw(st.integers(1, 3)) * 8,
        num_attention_heads=groups * heads_per_group,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 200)),
        qkv_bias=True,
        attention_output_bias=True,
        qk_norm=True,
        tie_word_embeddings=draw(st.booleans()),
    )
    return arch, tp


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_rule_is_undone_exactly_at_every_tp(case: Any) -> None:
    arch, tp = case
    if arch.num_key_value_heads % tp and (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim % tp:
        return  # Megatron cannot build this model either: its fused projection does not divide
    generator = torch.Generator().manual_seed(0)
    for role in ("policy", "critic"):
        for entry in plan_mapping(arch, role):  # type: ignore[arg-type]
            kind = entry.functions
            tensors = [torch.randn(shape, generator=generator) for shape in entry.hf_shapes]
            full = kind.merge(tensors, arch)
            shards = [kind.shard(full, tp, rank, arch) for rank in range(tp)]
            assert {tuple(shard.shape) for shard in shards} == {entry.shard_shape(tp, arch)}
            back = kind.split(kind.unshard(shards, arch), arch)
            assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True)), entry
            for rank in range(tp):
                sources = [InMemory(tensor) for tensor in tensors]
                assert torch.equal(kind.load(sources, tp, rank, arch), shards[rank]), entry


def test_loading_reads_only_the_rank_s_share() -> None:
    arch = make_arch(num_attention_heads=8, num_key_value_heads=4, vocab_size=64)
    for entry in plan_mapping(arch, "policy"):
        sources = [InMemory(torch.zeros(shape)) for shape in entry.hf_shapes]
        entry.functions.load(sources, 4, 1, arch)
        share = 4 if entry.functions.sharded else 1
        assert sum(source.numbers for source in sources) * share == sum(source.tensor.numel() for source in sources), entry


def test_fused_qkv_rows_go_group_by_group() -> None:
    arch = make_arch(num_attention_heads=4, num_key_value_heads=2, head_dim=2, hidden_size=1)
    q = torch.arange(8.0)[:, None]  # heads 0..3 of two rows
    k = torch.arange(100.0, 104.0)[:, None]
    v = torch.arange(200.0, 204.0)[:, None]
    full = KINDS["qkv"].merge([q, k, v], arch)
    assert full[:, 0].tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    # Two groups on four ranks: equal blocks of the fused rows, as Megatron all-gathers the outputs of a group's ranks.
    assert KINDS["qkv"].shard(full, 4, 1, arch)[:, 0].tolist() == [100, 101, 200, 201]


def test_gate_and_up_are_each_cut() -> None:
    arch = make_arch()
    full = KINDS["gated"].merge([torch.arange(4.0), torch.arange(10.0, 14.0)], arch)
    assert KINDS["gated"].shard(full, 2, 0, arch).tolist() == [0, 1, 10, 11]
    assert KINDS["gated"].shard(full, 2, 1, arch).tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zero_rows_to_eight_a_rank() -> None:
    arch = make_arch(vocab_size=17)
    table = torch.ones(17, 3)
    shards = [KINDS["vocab"].shard(table, 4, rank, arch) for rank in range(4)]
    assert [shard.sum().item() for shard in shards] == [24, 24, 3, 0]
    assert all(shard.shape == (8, 3) for shard in shards)


def test_a_dimension_that_does_not_divide_is_named() -> None:
    arch = make_arch()
    with pytest.raises(ConfigError, match="dimension of 6 cannot be split into tensor_model_parallel_size = 4"):
        KINDS["column"].shard(torch.zeros(6, 2), 4, 0, arch)
