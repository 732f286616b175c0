"""THD layout: padding, the zig-zag split, gathering, shifting; all ranks of a group are built in one process."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vapo_mcore.data.thd import ThdLayout, pad_multiples
from vapo_mcore.megatron.host import import_megatron


def layouts(lengths: list[int], cp: int, tp: int = 1) -> list[ThdLayout]:
    return [ThdLayout(lengths, context_parallel_size=cp, context_parallel_rank=rank, tensor_parallel_size=tp) for rank in range(cp)]


def split_then_gather(ranks: list[ThdLayout], x: Tensor, fill: float = 0) -> list[Tensor]:
    """What every rank has after all sharded ``x`` and the group was gathered."""
    local = torch.cat([layout.shard(x, fill) for layout in ranks])
    return [layout.unshard(local) for layout in ranks]


def zigzag_by_hand(padded: list[int], cp: int, rank: int) -> list[int]:
    """Positions in the padded frame that a rank holds: chunk r and chunk 2 cp - 1 - r of each sequence."""
    held, start = [], 0
    for length in padded:
        chunk = length // (2 * cp)
        first = range(start + rank * chunk, start + (rank + 1) * chunk)
        second = range(start + (2 * cp - 1 - rank) * chunk, start + (2 * cp - rank) * chunk)
        held += [*first, *second] if cp > 1 else list(range(start, start + length))
        start += length
    return held


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", [[1], [2], [3], [5], [17], [1, 2, 3, 5, 17], [17, 1, 1], [1, 1, 1, 1]])
def test_split_then_gather_is_the_identity(lengths: list[int], cp: int) -> None:
    for tp in (1, 2):
        ranks = layouts(lengths, cp, tp)
        x = torch.arange(1, sum(lengths) + 1)
        for y in (x, x.double() / 7, x % 2 == 0, torch.stack([x, -x], dim=1)):
            assert all(torch.equal(got, y) for got in split_then_gather(ranks, y))


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12), cp=st.sampled_from([1, 2, 3, 4, 8]), tp=st.sampled_from([1, 2, 3, 4]))
def test_any_layout(lengths: list[int], cp: int, tp: int) -> None:
    ranks = layouts(lengths, cp, tp)
    sequence_multiple, total_multiple = pad_multiples(cp, tp)
    padded = ranks[0].padded_lengths_list
    # Padding: every sequence to 2 cp, the total to tp as well, no more than that, trailing pads in the last sequence.
    assert all(length % sequence_multiple == 0 for length in padded)
    assert sum(padded) % total_multiple == 0
    assert all(0 <= p - n < sequence_multiple for p, n in zip(padded[:-1], lengths[:-1], strict=True))
    assert 0 <= padded[-1] - lengths[-1] < sequence_multiple + total_multiple
    assert ranks[0].num_local_tokens * cp == ranks[0].num_padded_tokens == sum(padded)
    assert ranks[0].num_local_tokens % tp == 0
    assert ranks[0].max_seqlen == max(padded)
    x = torch.arange(1, sum(lengths) + 1)
    assert all(torch.equal(got, x) for got in split_then_gather(ranks, x))
    owner = torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded))
    starts = torch.tensor([0, *itertools.accumulate(padded)])
    for rank, layout in enumerate(ranks):
        assert layout.local_index.tolist() == zigzag_by_hand(padded, cp, rank)
        position = layout.local_index - starts[owner[layout.local_index]]
        assert torch.equal(layout.position_ids, position)
        assert torch.equal(layout.local_token_mask, position < torch.tensor(lengths)[owner[layout.local_index]])
        assert torch.equal(layout.shard(x, 0) > 0, layout.local_token_mask)


def test_two_sequences_on_two_ranks_by_hand() -> None:
    # [5, 6, 7, 8, 9] is padded to 8 (chunks of 2), [30, 31] to 4 (chunks of 1); 12 in all, a multiple of 2 x 2 x 1.
    first, second = layouts([5, 2], cp=2)
    x = torch.tensor([5, 6, 7, 8, 9, 30, 31])
    assert first.shard(x, -1).tolist() == [5, 6, -1, -1, 30, -1]
    assert second.shard(x, -1).tolist() == [7, 8, 9, -1, 31, -1]
    assert first.cu_seqlens.tolist() == [0, 5, 7]
    assert first.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert first.cu_seqlens_padded.dtype == torch.int32
    assert first.position_ids.tolist() == [0, 1, 6, 7, 0, 3]
    assert second.position_ids.tolist() == [2, 3, 4, 5, 1, 2]
    assert first.last_token_index.tolist() == [4, 6]


def test_labels_stay_inside_their_sequence() -> None:
    # Scenario 13: in [5, 6, 7, 8] + [30, 31], 8 never has label 30, and 31 never has label 5.
    layout = ThdLayout([4, 2])
    x = torch.tensor([5, 6, 7, 8, 30, 31])
    labels = layout.shift_left(x, -100)
    assert labels.tolist() == [6, 7, 8, -100, 31, -100]
    assert layout.shift_right(labels, 0).tolist() == [0, 6, 7, 8, 0, 31]
    assert x.tolist() == [5, 6, 7, 8, 30, 31]


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_the_value_shift_is_done_on_whole_sequences(cp: int) -> None:
    # Scenario 14: raw critic outputs are gathered over CP first and shifted then, so each token gets its predecessor's output.
    lengths = [1, 2, 3, 5, 17]
    ranks = layouts(lengths, cp)
    raw = torch.arange(sum(lengths), dtype=torch.float32) + 1
    starts = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    expected = raw - 1
    expected[starts] = -9.0
    for layout, gathered in zip(ranks, split_then_gather(ranks, raw), strict=True):
        assert torch.equal(layout.shift_right(gathered, -9.0), expected)


def test_shifts_of_vectors_and_booleans() -> None:
    layout = ThdLayout([2, 1])
    assert layout.shift_left(torch.tensor([[1, 2], [3, 4], [5, 6]]), 0).tolist() == [[3, 4], [0, 0], [0, 0]]
    assert layout.shift_left(torch.tensor([False, True, True]), False).tolist() == [True, False, False]


@pytest.mark.parametrize(("cp", "tp", "size"), [(1, 1, 2), (1, 4, 4), (2, 1, 4), (4, 2, 16)])
def test_an_empty_microbatch_is_one_dummy_sequence_of_the_pad_multiple(cp: int, tp: int, size: int) -> None:
    """At least two tokens: Transformer Engine refuses the strides that one has with one key-value head."""
    for layout in layouts([], cp, tp):
        assert layout.is_dummy
        assert (layout.num_tokens, layout.num_sequences, layout.num_padded_tokens) == (0, 0, size)
        assert layout.num_local_tokens == size // cp
        assert layout.cu_seqlens.tolist() == [0]
        assert layout.cu_seqlens_padded.tolist() == [0, size]
        empty = torch.empty(0)
        assert layout.shard(empty, 3.0).tolist() == [3.0] * (size // cp)
        assert not layout.local_token_mask.any()
        assert layout.unshard(torch.ones(size)).tolist() == []
        assert layout.shift_left(empty, 0.0).tolist() == []
        assert layout.shift_right(empty, 0.0).tolist() == []


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 5, 17], [6], []])
def test_padding_to_a_larger_total_adds_sequences_of_pads_only(lengths: list[int], cp: int) -> None:
    target = 4096 + 16 * cp
    plain, ranks = layouts(lengths, cp, tp=2), [layout.with_padding(target) for layout in layouts(lengths, cp, tp=2)]
    x = torch.arange(1, sum(lengths) + 1)
    assert all(torch.equal(got, x) for got in split_then_gather(ranks, x))
    for before, after in zip(plain, ranks, strict=True):
        assert (after.num_padded_tokens, after.num_local_tokens) == (target, target // cp)
        assert after.padded_lengths_list[: len(lengths)] == before.padded_lengths_list[: len(lengths)]
        assert after.local_index.tolist() == zigzag_by_hand(after.padded_lengths_list, cp, before.context_parallel_rank)
        assert int(after.local_token_mask.sum()) == int(before.local_token_mask.sum())
        assert torch.equal(after.shift_left(x, 0), before.shift_left(x, 0))
        assert after.max_seqlen <= 512
    for impossible in (16, target + 1):
        with pytest.raises(ValueError, match="cannot pad"):
            layouts([40], cp, tp=2)[0].with_padding(impossible)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 0 tokens"):
        ThdLayout([3, 0])
    with pytest.raises(ValueError, match="rank 2 is outside a group of 2"):
        ThdLayout([3], context_parallel_size=2, context_parallel_rank=2)
    layout = ThdLayout([3], context_parallel_size=2)
    with pytest.raises(ValueError, match="4 tokens was given where the layout has 3"):
        layout.shard(torch.zeros(4), 0)
    with pytest.raises(ValueError, match="needs the process group"):
        layout.gather(torch.zeros(2), None)


def test_gather_detaches_its_input() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not ThdLayout([3]).gather(x * 2, None).requires_grad


class _Group:
    """Size and rank of a process group, which is all that rotary code asks for."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 5, 17], [6], []])
def test_megatrons_rotary_code_sees_our_positions(lengths: list[int], cp: int) -> None:
    import_megatron()  # imported past it, Megatron's functions would be compiled through the replacements of a later test
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd, _apply_rotary_pos_emb_thd

    for rank, layout in enumerate(layouts(lengths, cp, tp=2)):
        parameters = layout.packed_seq_params()
        assert parameters.qkv_format == "thd"
        inverse_frequency = torch.tensor([1.0, 0.1])
        angles = torch.arange(parameters.max_seqlen_q)[:, None] * inverse_frequency
        frequencies = torch.cat([angles, angles], dim=-1)[:, None, None]
        torch.manual_seed(0)
        query = torch.randn(layout.num_local_tokens, 2, 4)
        offsets = parameters.cu_seqlens_q if parameters.cu_seqlens_q_padded is None else parameters.cu_seqlens_q_padded  # as Megatron does
        rotated = _apply_rotary_pos_emb_thd(query, offsets, frequencies, cp_group=_Group(cp, rank))
        expected = _apply_rotary_pos_emb_bshd(query[:, None], frequencies[layout.position_ids])[:, 0]
        assert torch.equal(rotated, expected)


def test_transformer_engine_compares_no_offsets_without_context_parallelism() -> None:
    """Its attention asks the device whether padded offsets differ from the real ones, if it is given both."""
    (alone,), shared = layouts([5, 3], 1, tp=1), layouts([5, 3], 2, tp=1)
    assert alone.packed_seq_params().cu_seqlens_q_padded is alone.packed_seq_params().cu_seqlens_kv_padded is None
    for layout in shared:
        parameters = layout.packed_seq_params()
        assert parameters.cu_seqlens_q_padded is parameters.cu_seqlens_q
        assert parameters.cu_seqlens_kv_padded is parameters.cu_seqlens_kv
