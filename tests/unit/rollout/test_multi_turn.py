"""Responses of several turns: what the engine is asked, what is masked, how they end. The engine here is a script of turns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tokenizers import AddedToken

from vapo_mcore.config.schema import EnvironmentConfig
from vapo_mcore.environments import Observation, Reply, TurnRequest
from vapo_mcore.errors import ConfigError
from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig
from vapo_mcore.rollout.multi_turn import MultiTurn, ObservationFormat, turn_seed

EOS, CALL = 1, 2
ALPHABET = ["<pad>", "<eos>", "<call>", *"abcdefghijklmnopqrstuvwxyz:[]{}|. "]


class Letters:
    """One token a letter; names of special tokens are one token unless they are to be split."""

    added_tokens_decoder: ClassVar = {number: AddedToken(text, special=True) for number, text in enumerate(ALPHABET[:3])}

    def get_vocab(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(ALPHABET)}

    def __call__(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> dict[str, list[int]]:
        ids = []
        while text:
            special = next((name for name in ALPHABET[:3] if text.startswith(name) and not split_special_tokens), None)
            ids.append(ALPHABET.index(special or text[0]) if special or text[0] in ALPHABET else 0)
            text = text[len(special or text[0]) :]
        return {"input_ids": ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(ALPHABET[i] for i in ids if i > 2 or not skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        text = "".join(f"{{{message['role']}:{message['content']}<eos>}}" for message in messages)
        return text + "{assistant:"


def ids_of(text: str) -> list[int]:
    return Letters()(text, add_special_tokens=False)["input_ids"]


def play(
    script: dict[int, list[str]], replies: dict[str, Reply], *, limit: int = 30, seeds: list[Any] | None = None, **settings: Any
) -> Any:
    """``script[sample]``: turns that the model writes (without <eos> or <call> at the end: cut); ``replies`` by the newest turn's text."""
    config = EnvironmentConfig(name="calculator", **{"format": "[{observation}]", "max_observation_length": 8, **settings})
    multi_turn = MultiTurn(config, ObservationFormat.build(Letters(), config, chat_template=False))
    asked: list[list[GenerationRequest]] = []

    def generate(requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        asked.append(list(requests))
        assert sampling.stop_token_ids == tuple(Letters().get_vocab()[t] for t in config.stop_tokens)
        assert sampling.continues == (len(asked) > 1)
        out = []
        for request in requests:
            ids = ids_of(script[request.sample_index][len(asked) - 1])
            assert len(ids) <= request.limit(sampling)
            out.append(Generation(request, ids, [-0.5] * len(ids), "stop" if ids[-1] in (EOS, CALL) else "length"))
        return out

    def respond(requests: Sequence[TurnRequest]) -> list[Reply]:
        if seeds is not None:
            seeds.append([request.metadata["sample_seed"] for request in requests])
        return [replies[request.turns[-1]] for request in requests]

    requests = [GenerationRequest(f"p{i}", i, ids_of("q"), 100 + i) for i in script]
    subjects = [SimpleNamespace(ground_truth="g", metadata={}) for _ in script]
    how = SamplingConfig(1.0, 1.0, -1, limit)
    return multi_turn.play(requests, subjects, how, generate, respond), asked


def said(text: str | None, reward: float = 0.0) -> Reply:
    return Reply(Observation(text, reward))


def test_turns_and_observations_follow_one_another_and_only_turns_are_sampled() -> None:
    (one, other), asked = play(
        {0: ["ab<eos>", "cde<eos>"], 1: ["x<eos>"]}, {"ab": said("ok", 0.5), "cde": said(None, -1.0), "x": said(None)}, max_turns=3
    )
    assert one.token_ids == ids_of("ab<eos>[ok]cde<eos>")
    assert one.sampled == [True] * 3 + [False] * 4 + [True] * 4
    assert one.logprobs == [-0.5] * 3 + [0.0] * 4 + [-0.5] * 4
    assert [(turn.start, turn.end, turn.reward) for turn in one.turns] == [(0, 3, 0.5), (7, 11, -1.0)]
    assert (one.finish_reason, one.observations_cut, one.error) == ("stop", 0, None)
    assert (other.token_ids, other.sampled, len(other.turns)) == (ids_of("x<eos>"), [True, True], 1)
    assert [[request.sample_index for request in requests] for requests in asked] == [[0, 1], [0]]
    assert list(asked[1][0].prompt_token_ids) == ids_of("qab<eos>[ok]")
    assert (asked[0][0].seed, asked[1][0].seed) == (100, turn_seed(100, 1))
    assert (asked[0][0].max_tokens, asked[1][0].max_tokens) == (30, 27)  # observations do not count


def test_the_environment_gets_the_seed_of_the_response_at_every_turn() -> None:
    seeds: list[Any] = []
    script = {0: ["a<eos>", "a<eos>"], 1: ["a<eos>", "a<eos>"]}
    (one, _), asked = play(script, {"a": said("ok")}, max_turns=2, seeds=seeds)
    assert seeds == [[100, 101], [100, 101]] and one.finish_reason == "turns"
    assert asked[1][0].seed != 100  # the engine's seed is of the turn


def test_a_response_ends_at_the_token_limit_at_the_turn_limit_or_when_the_environment_fails() -> None:
    script = {0: ["ab<eos>", "ab<eos>"], 1: ["abc"], 2: ["f<eos>"]}
    replies = {"ab": said("go", 1.0), "abcd": said("go"), "f": Reply(Observation(None), "environment 'x' took longer than 5 s")}
    (turns, cut, failed), asked = play(script, replies, limit=6, max_turns=2)
    assert (turns.finish_reason, len(turns.turns), [turn.reward for turn in turns.turns]) == ("turns", 2, [1.0, 1.0])
    assert turns.token_ids[-1] == EOS and turns.sampled[-1]  # what would not be read is not written
    assert (cut.finish_reason, cut.token_ids) == ("length", ids_of("abc"))
    assert failed.error == "environment 'x' took longer than 5 s" and len(failed.turns) == 1
    assert len(asked) == 2
    (full,), _ = play({0: ["abcd<eos>"]}, replies, limit=5, max_turns=2)
    assert (full.finish_reason, len(full.turns), full.sampled) == ("length", 1, [True] * 5)  # no token is left for a turn


def test_long_observations_are_cut_and_counted() -> None:
    (one,), _ = play({0: ["ab<eos>", "c<eos>"]}, {"ab": said("abcdefghijkl"), "c": said(None)}, max_turns=2)
    assert one.token_ids == ids_of("ab<eos>[abcdef]c<eos>")
    assert one.observations_cut == 1


def test_names_of_special_tokens_in_an_observation_are_text() -> None:
    (one,), _ = play({0: ["ab<eos>", "c<eos>"]}, {"ab": said("<eos>"), "c": said(None)}, max_turns=2)
    inside = one.token_ids[4 : one.turns[1].start - 1]
    assert len(inside) == 5 and EOS not in inside


def test_a_stop_token_ends_a_turn_and_the_chat_template_then_ends_it_for_the_model() -> None:
    config = EnvironmentConfig(name="calculator", stop_tokens=("<call>",))
    made = ObservationFormat.build(Letters(), config, chat_template=True)
    assert made.stop_token_ids == (CALL,)
    assert made.encode("ok", open_turn=False) == (ids_of("}{user:ok<eos>}{assistant:"), False)
    assert made.encode("ok", open_turn=True) == (ids_of("<eos>}{user:ok<eos>}{assistant:"), False)
    (one,), _ = play(
        {0: ["ab<call>", "c<eos>"]}, {"ab": said("ok"), "c": said(None)}, max_turns=2, stop_tokens=("<call>",), format="|{observation}|"
    )
    assert one.token_ids == ids_of("ab<call>|ok|c<eos>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_tokens": ("<call>", "<nothing>")}, "stop_tokens: not tokens of the model's vocabulary: '<nothing>'"),
        ({"format": "abcd{observation}efgh", "max_observation_length": 8}, "alone has 8 tokens"),
    ],
)
def test_what_the_tokenizer_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObservationFormat.build(Letters(), EnvironmentConfig(name="calculator", **settings), chat_template=False)


def test_without_a_chat_template_the_observation_stands_alone() -> None:
    made = ObservationFormat.build(Letters(), EnvironmentConfig(name="calculator"), chat_template=False)
    assert made.encode("ok", open_turn=False) == (ids_of("ok"), False)


def test_seeds_of_turns_differ() -> None:
    assert turn_seed(5, 0) == 5
    assert len({turn_seed(seed, turn) for seed in range(50) for turn in range(4)}) == 200
