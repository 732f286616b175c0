"""The rollout batch and its micro-batches: ragged selection, concatenation, validation."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vapo_mcore.data.microbatch import make_microbatch
from vapo_mcore.data.ragged import cumulative, segment_ids, segment_positions, token_index
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows


def rows_of(prompt_lengths: list[int], response_lengths: list[int], **changes: Any) -> Rows:
    n = len(prompt_lengths)
    columns: dict[str, Any] = {
        "prompt_id": [f"p/{i}" for i in range(n)],
        "group": torch.arange(n),
        "sample_index": torch.zeros(n, dtype=torch.int64),
        "verdict": torch.arange(n) % 2 == 0,
        "graded": torch.ones(n, dtype=torch.bool),
        "ungraded": [""] * n,
        "score": torch.arange(n, dtype=torch.float32),
        "reward": torch.arange(n, dtype=torch.float32) - 1,
        "finish_reason": ["stop"] * n,
        "prompt_length": torch.tensor(prompt_lengths, dtype=torch.int64),
        "response_length": torch.tensor(response_lengths, dtype=torch.int64),
        "tool_length": torch.zeros(n, dtype=torch.int64),
        "turns": torch.ones(n, dtype=torch.int64),
        "observations_cut": torch.zeros(n, dtype=torch.int64),
        "missed_end": torch.zeros(n, dtype=torch.bool),
        "source": ["p"] * n,
        "step_rewards": [()] * n,
        "segments": [()] * n,
        "observations": [()] * n,
    }
    return Rows(**{**columns, **changes})


def three_responses() -> RolloutBatch:
    rows = rows_of([2, 1, 3], [1, 0, 2], finish_reason=["stop", "stop", "length"])
    return RolloutBatch.from_responses(rows, [[1, 2], [3], [4, 5, 6]], [[7], [], [8, 9]], [[-0.5], [], [-1.5, -2.5]])


def test_from_responses_lays_prompt_and_response_end_to_end() -> None:
    batch = three_responses()
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 9]
    assert batch["tokens"].tolist() == [1, 2, 7, 3, 4, 5, 6, 8, 9]
    assert batch["response_mask"].tolist() == [False, False, True, False, False, False, False, True, True]
    assert batch["rollout_logprobs"].tolist() == [0, 0, -0.5, 0, 0, 0, 0, -1.5, -2.5]
    assert batch.rows.truncated.tolist() == [False, False, True]
    assert batch.row_ids.tolist() == [0, 1, 2]


def test_sampled_tokens_are_found_between_observations() -> None:
    """A prompt of 2 tokens; 3 sampled ones, 4 of the environment, 2 sampled, 1 of the environment, 2 sampled."""
    rows = rows_of([2], [7], tool_length=torch.tensor([5]), observations=[((3, 4), (5, 1))])
    sampled = [2, 3, 4, 9, 10, 12, 13]
    assert [rows.place(0, count) for count in range(7)] == sampled
    assert [rows.sampled_before(0, position) for position in range(2, 15)] == [
        sum(place < position for place in sampled) for position in range(2, 15)
    ]
    with pytest.raises(ValueError, match=r"row 0 has 5 tokens of its environment, but its observations are \(\(3, 4\),\)"):
        rows_of([2], [7], tool_length=torch.tensor([5]), observations=[((3, 4),)])


def test_a_rank_that_generated_nothing_has_the_same_tensors() -> None:
    batch = RolloutBatch.from_responses(Rows.empty(), [], [], [])
    assert len(batch) == batch.num_tokens == 0
    assert {name: x.dtype for name, x in batch.tensors.items()} == {name: x.dtype for name, x in three_responses().tensors.items()}


def test_select_takes_rows_with_their_tokens_in_the_given_order() -> None:
    part = three_responses().select([2, 0])
    assert part.rows.prompt_id == ["p/2", "p/0"]
    assert part.rows.finish_reason == ["length", "stop"]
    assert part.row_ids.tolist() == [2, 0]
    assert part["tokens"].tolist() == [4, 5, 6, 8, 9, 1, 2, 7]
    assert part.cu_seqlens.tolist() == [0, 5, 8]


def test_concat_of_the_parts_is_the_whole() -> None:
    batch = three_responses()
    joined = RolloutBatch.concat([batch.select([0]), batch.select([]), batch.select([1, 2])])
    for name, tensor in batch.tensors.items():
        assert torch.equal(joined[name], tensor)
    assert joined.rows.prompt_id == batch.rows.prompt_id
    assert torch.equal(joined.cu_seqlens, batch.cu_seqlens)
    assert torch.equal(joined.row_ids, batch.row_ids)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=10), data=st.data())
def test_ragged_indices(lengths: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(lengths, dtype=torch.int64)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12)) if lengths else []
    pieces = torch.arange(sum(lengths)).split(lengths)
    expected = [t for row in chosen for t in pieces[row].tolist()]
    assert token_index(cumulative(tensor), torch.tensor(chosen, dtype=torch.int64)).tolist() == expected
    assert segment_ids(tensor).tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert segment_positions(tensor).tolist() == [t for n in lengths for t in range(n)]


def test_local_rows_find_replicated_numbers() -> None:
    batch = three_responses()
    part = RolloutBatch(batch.rows, batch.cu_seqlens, batch.tensors, torch.tensor([40, 7, 12]))
    assert part.local_rows([12, 40]).tolist() == [2, 0]
    assert part.local_rows([]).tolist() == []
    for missing in ([8], [41], [7, 8]):
        with pytest.raises(ValueError, match="does not hold"):
            part.local_rows(missing)


def test_results_of_microbatches_come_back_to_their_rows() -> None:
    batch = three_responses()
    indices = [make_microbatch(batch, rows).index for rows in ([2], [0])]
    batch.scatter_tokens("values", [torch.tensor([5.0, 6, 7, 8, 9]), torch.tensor([1.0, 2, 3])], indices)
    assert batch["values"].tolist() == [1, 2, 3, 0, 5, 6, 7, 8, 9]
    batch.scatter_tokens("values", [], [])
    assert batch["values"].tolist() == [0.0] * 9


def test_microbatch_packs_rows_in_order_with_only_the_wanted_tensors() -> None:
    batch = three_responses()
    microbatch = make_microbatch(batch, [2, 1], context_parallel_size=2, context_parallel_rank=1, names=["tokens"])
    assert microbatch.tensors["tokens"].tolist() == [4, 5, 6, 8, 9, 3]
    assert list(microbatch.tensors) == ["tokens"]
    assert microbatch.rows.tolist() == [2, 1]
    assert microbatch.index is not None and torch.equal(batch["tokens"][microbatch.index], microbatch.tensors["tokens"])
    assert microbatch.layout.padded_lengths_list == [8, 4]
    assert microbatch.layout.shard(microbatch.tensors["tokens"], 0).tolist() == [6, 8, 9, 0, 0, 0]
    more = microbatch.with_tensors(values=torch.zeros(6))
    assert set(more.tensors) == {"tokens", "values"}
    with pytest.raises(ValueError, match="tensor values has 5 tokens, the layout has 6"):
        microbatch.with_tensors(values=torch.zeros(5))


def test_no_rows_make_the_dummy_microbatch() -> None:
    microbatch = make_microbatch(three_responses(), [], tensor_parallel_size=4)
    assert microbatch.is_dummy
    assert microbatch.layout.num_local_tokens == 4
    assert {name: x.numel() for name, x in microbatch.tensors.items()} == {"tokens": 0, "response_mask": 0, "rollout_logprobs": 0}


def test_what_does_not_fit_together_is_refused() -> None:
    batch = three_responses()
    with pytest.raises(ValueError, match=r"column score is torch.float64 \[2\], expected torch.float32 \[2\]"):
        rows_of([1, 1], [1, 1], score=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="column source has 1 entries, prompt_id has 2"):
        rows_of([1, 1], [1, 1], source=["p"])
    with pytest.raises(ValueError, match="finish reason 'abort' is not one of"):
        rows_of([1], [1], finish_reason=["abort"])
    with pytest.raises(ValueError, match="a prompt has at least 1 token"):
        rows_of([0], [1])
    with pytest.raises(ValueError, match="does not agree with the prompt and response lengths"):
        RolloutBatch(batch.rows, torch.tensor([0, 3, 5, 9]), {})
    with pytest.raises(ValueError, match="tensor values has shape"):
        batch["values"] = torch.zeros(8)
    with pytest.raises(ValueError, match="row_ids must be 3 different numbers"):
        RolloutBatch(batch.rows, batch.cu_seqlens, {}, torch.tensor([1, 1, 2]))
    with pytest.raises(ValueError, match="do not agree with the prompt and response lengths"):
        RolloutBatch.from_responses(rows_of([1], [2]), [[1]], [[2]], [[-1.0]])
    with pytest.raises(ValueError, match="different tensors"):
        RolloutBatch.concat([batch, RolloutBatch(Rows.empty(), torch.zeros(1, dtype=torch.int64), {})])
