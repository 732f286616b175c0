"""The self-imitation buffer: what is kept under each policy, limits, ages, saving."""

import io
import itertools

import pytest
import torch

from vapo_mcore.algorithm.replay import ReplayBuffer


def offer(buffer: ReplayBuffer, step: int, *responses: tuple[str, float, list[int]], correct: list[bool] | None = None) -> int:
    """Each response: prompt id, reward, token ids (the first is the prompt's)."""
    lengths = [len(tokens) for _, _, tokens in responses]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    mask[cu_seqlens[:-1]] = False
    return buffer.add(
        torch.tensor([t for _, _, tokens in responses for t in tokens]),
        mask,
        torch.tensor([float(10 * t) for _, _, tokens in responses for t in tokens]),
        cu_seqlens,
        torch.tensor([reward for _, reward, _ in responses]),
        torch.tensor(correct if correct is not None else [True] * len(responses)),
        [prompt for prompt, _, _ in responses],
        step,
    )


def contents(buffer: ReplayBuffer) -> list[tuple[str, float, list[int], int]]:
    state = buffer.state_dict()
    bounds = state["cu_seqlens"].tolist()
    rows = itertools.pairwise(bounds)
    tokens = [state["tokens"][lo:hi].tolist() for lo, hi in rows]
    return list(zip(state["prompt_ids"], state["rewards"].tolist(), tokens, state["steps"].tolist(), strict=True))


def test_only_correct_responses_and_the_best_of_each_prompt_are_candidates() -> None:
    buffer = ReplayBuffer(10)
    added = offer(
        buffer, 1, ("a", 0.5, [1, 2]), ("a", 1.0, [1, 3]), ("a", 9.0, [1, 4]), ("b", 0.0, [5, 6]), correct=[True, True, False, False]
    )
    assert added == 1 and contents(buffer) == [("a", 1.0, [1, 3], 1)]


def test_a_response_without_response_tokens_is_no_candidate() -> None:
    buffer = ReplayBuffer(10)
    assert offer(buffer, 1, ("a", 2.0, [1]), ("a", 1.0, [1, 3])) == 1
    assert contents(buffer) == [("a", 1.0, [1, 3], 1)]


def test_top_reward_keeps_the_best_and_prefers_the_newer_among_equals() -> None:
    buffer = ReplayBuffer(2, eviction="top_reward")
    offer(buffer, 1, ("a", 1.0, [1, 1]), ("b", 0.5, [2, 1]))
    assert offer(buffer, 2, ("c", 0.2, [3, 1])) == 0  # would be the lowest
    assert offer(buffer, 3, ("d", 0.75, [4, 1]), ("a", 0.9, [1, 2])) == 1  # a worse one of a's does not replace the better
    assert contents(buffer) == [("a", 1.0, [1, 1], 1), ("d", 0.75, [4, 1], 3)]
    assert offer(buffer, 4, ("a", 1.0, [1, 3])) == 1
    assert contents(buffer) == [("d", 0.75, [4, 1], 3), ("a", 1.0, [1, 3], 4)]


def test_fifo_drops_the_oldest_and_limits_each_prompt() -> None:
    buffer = ReplayBuffer(3, eviction="fifo", top_k=2)
    offer(buffer, 1, ("a", 1.0, [1, 1]), ("a", 1.0, [1, 2]), ("a", 0.9, [1, 3]))
    assert [row[2] for row in contents(buffer)] == [[1, 1], [1, 2]]
    offer(buffer, 2, ("b", 0.125, [2, 1]), ("a", 0.125, [1, 4]))
    assert [row[2] for row in contents(buffer)] == [[1, 2], [2, 1], [1, 4]]
    offer(buffer, 3, ("c", 0.1, [3, 1]))
    assert [row[2] for row in contents(buffer)] == [[2, 1], [1, 4], [3, 1]]


def test_frozen_fills_and_never_changes() -> None:
    buffer = ReplayBuffer(2, eviction="frozen")
    assert offer(buffer, 1, ("a", 0.125, [1, 1])) == 1
    assert offer(buffer, 2, ("a", 1.0, [1, 2]), ("b", 0.125, [2, 1]), ("c", 1.0, [3, 1])) == 1
    assert buffer.is_frozen and offer(buffer, 3, ("d", 1.0, [4, 1])) == 0
    assert contents(buffer) == [("a", 0.125, [1, 1], 1), ("b", 0.125, [2, 1], 2)]
    early = ReplayBuffer(9, eviction="frozen")
    offer(early, 1, ("a", 1.0, [1, 1]))
    early.freeze()
    assert offer(early, 2, ("b", 1.0, [2, 1])) == 0 and len(early) == 1
    with pytest.raises(ValueError, match="only a frozen buffer"):
        ReplayBuffer(1).freeze()


@pytest.mark.parametrize(("eviction", "step"), [("fifo", 7), ("top_reward", 7), ("frozen", 1)])
def test_the_same_response_again_is_not_stored_twice(eviction: str, step: int) -> None:
    buffer = ReplayBuffer(5, eviction=eviction, top_k=3)
    offer(buffer, 1, ("a", 1.0, [1, 1]))
    offer(buffer, 7, ("a", 1.0, [1, 1]), ("b", 1.0, [1, 1]))
    assert [(prompt, when) for prompt, _, _, when in contents(buffer)] == [("a", step), ("b", 7)]
    assert buffer.ages(9).tolist() == [9 - step, 2]


def test_sample_is_without_repetition_seeded_and_packed() -> None:
    buffer = ReplayBuffer(10)
    offer(buffer, 1, *((str(i), 1.0, [0] * i + [i, i]) for i in range(6)))
    sample = buffer.sample(4, torch.Generator().manual_seed(0))
    assert len(set(sample.prompt_ids)) == 4 and sample.rewards.tolist() == [1.0] * 4 and sample.steps.tolist() == [1] * 4
    for k, prompt in enumerate(sample.prompt_ids):
        span = slice(int(sample.cu_seqlens[k]), int(sample.cu_seqlens[k + 1]))
        assert sample.tokens[span].tolist() == [0] * int(prompt) + [int(prompt)] * 2
        assert sample.response_mask[span].tolist() == [False] + [True] * (int(prompt) + 1)
        assert sample.returns[span].tolist() == [10.0 * token for token in sample.tokens[span].tolist()]
    assert buffer.sample(4, torch.Generator().manual_seed(0)).prompt_ids == sample.prompt_ids
    assert sorted(buffer.sample(99, torch.Generator().manual_seed(0)).prompt_ids) == list("012345")
    assert ReplayBuffer(1).sample(3, torch.Generator()).tokens.shape == (0,)


def test_state_round_trip_through_a_file_without_pickled_code() -> None:
    buffer = ReplayBuffer(3, top_k=2)
    offer(buffer, 1, ("a", 1.0, [1, 1]), ("a", 0.3, [1, 2, 3]), ("b", 0.125, [2, 1]))
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    loaded = ReplayBuffer(3, top_k=2)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert contents(loaded) == contents(buffer)
    for each in (buffer, loaded):
        offer(each, 2, ("c", 0.2, [3, 1]))
    assert contents(loaded) == contents(buffer)
    assert torch.equal(loaded.state_dict()["returns"], buffer.state_dict()["returns"])


def test_a_state_of_other_settings_is_cut_to_the_present_ones() -> None:
    buffer = ReplayBuffer(4, top_k=2)
    offer(buffer, 1, ("a", 1.0, [1, 1]), ("a", 0.3, [1, 2, 3]), ("b", 0.125, [2, 1]), ("c", 0.5, [3, 1]))
    for settings, kept in (
        ({"capacity": 9, "top_k": 2}, ["a", "a", "b", "c"]),
        ({"capacity": 2, "top_k": 2}, ["a", "c"]),
        ({"capacity": 4, "top_k": 1}, ["a", "b", "c"]),
        ({"capacity": 2, "top_k": 1, "eviction": "fifo"}, ["b", "c"]),
        ({"capacity": 2, "top_k": 1, "eviction": "frozen"}, ["a", "b"]),
    ):
        loaded = ReplayBuffer(**settings)  # type: ignore[arg-type]
        loaded.load_state_dict(buffer.state_dict())
        assert [entry.prompt_id for entry in loaded._entries] == kept, settings
        assert loaded.is_frozen == (settings.get("eviction") == "frozen")
    frozen = ReplayBuffer(9, eviction="frozen")
    frozen.freeze()
    larger = ReplayBuffer(20, eviction="frozen")
    larger.load_state_dict(frozen.state_dict())
    assert larger.is_frozen
    newest = ReplayBuffer(9, eviction="fifo")
    newest.load_state_dict(frozen.state_dict())
    assert not newest.is_frozen


def test_the_buffer_owns_its_tensors() -> None:
    buffer = ReplayBuffer(3)
    tokens = torch.tensor([1, 2])
    mask, verdict = torch.tensor([False, True]), torch.ones(1, dtype=torch.bool)
    buffer.add(tokens, mask, torch.ones(2), torch.tensor([0, 2]), torch.ones(1), verdict, ["a"], 1)
    tokens.zero_()
    assert contents(buffer)[0][2] == [1, 2]


def test_wrong_arguments_are_refused() -> None:
    for arguments in ({"capacity": 0}, {"capacity": 1, "top_k": 0}, {"capacity": 1, "eviction": "lifo"}):
        with pytest.raises(ValueError, match="must be"):
            ReplayBuffer(**arguments)
    with pytest.raises(ValueError, match="for 1 responses"):
        ReplayBuffer(1).add(torch.ones(2), torch.ones(2), torch.ones(2), torch.tensor([0, 2]), torch.ones(2), torch.ones(1), ["a"], 1)
