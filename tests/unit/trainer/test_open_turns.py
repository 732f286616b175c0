"""Fixed-horizon rollouts of several turns, over simulated steps without processes: the real loop over turns and the real table.

The engine draws letters, as likely in any turn; the environment is a function of the turns and of the response's seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.rollout.test_multi_turn import ALPHABET, EOS, Letters, ids_of
from tests.unit.trainer.test_open_responses import LONGEST, PROBLEMS, STEPS, Run, configured
from vapo_mcore.checkpoint import state
from vapo_mcore.config import Config
from vapo_mcore.config.schema import EnvironmentConfig
from vapo_mcore.data.chat_template import ControlTokens
from vapo_mcore.environments import Observation, Reply, TurnRequest
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience.open_responses import OpenResponses
from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig, Trajectory, Turn
from vapo_mcore.rollout.multi_turn import Dialogue, MultiTurn, ObservationFormat
from vapo_mcore.rollout.stopping import StopTexts

TURNS = 5
ENVIRONMENT = {"name": "calculator", "max_turns": TURNS, "max_observation_length": 8, "format": "[{observation}]"}
SETTINGS = EnvironmentConfig(**ENVIRONMENT)
FORMAT = ObservationFormat.build(Letters(), SETTINGS, chat_template=False)
SAMPLING = SamplingConfig(1.0, 1.0, -1, LONGEST)
SMALL = {"tokens": 4, "in_flight": 15}


def with_turns(horizon: dict[str, Any], estimator: str = "gae") -> Config:
    return configured(horizon, estimator, environment=ENVIRONMENT)


def reply(request: TurnRequest) -> Reply:
    """Over in one of eight cases, broken in one of forty; else an observation of up to ten letters, and a reward."""
    chance = random.Random(f"{request.metadata['sample_seed']}/{request.ground_truth}/{'|'.join(request.turns)}")
    if chance.random() < 0.025:
        return Reply(Observation(None), "environment 'x' took longer than 5 s")
    if chance.random() < 0.125:
        return Reply(Observation(None, chance.choice([0.0, 0.5])))
    return Reply(Observation("".join(chance.choices("abcdefgh", k=chance.randint(0, 10))), chance.choice([0.0, -0.25, 1.0])))


def generate(request: GenerationRequest) -> Generation:
    """Ends a turn with one token in five."""
    draws = np.random.Generator(np.random.Philox(key=request.seed))
    ids: list[int] = []
    assert request.max_tokens is not None and request.max_tokens > 0
    while len(ids) < request.max_tokens and EOS not in ids:
        ids.append(EOS if draws.random() < 0.2 else int(draws.integers(3, len(ALPHABET))))
    return Generation(request, ids, [-0.5 * token for token in ids], "stop" if ids[-1] == EOS else "length")


class TurnsRun(Run):
    """A run whose responses have turns."""

    multi_turn = MultiTurn(SETTINGS, FORMAT)

    def _sampled(self, rank: OpenResponses, leaving: Any, table: Any) -> tuple[Any, Any]:
        rank.arrive(table, leaving)
        episodes, prompts = rank.episodes(table, self.step, self.multi_turn)
        self.multi_turn.advance(
            episodes, prompts, SAMPLING, lambda requests, _: [generate(r) for r in requests], lambda turns: [reply(t) for t in turns]
        )
        return table, rank.played(table, episodes)

    def resumed(self, replicas: int) -> TurnsRun:
        saved, files = self.saved()
        other = TurnsRun(self.config, replicas, self.step, self.drawn)
        for rank in other.ranks:
            rank.load_state_dict(saved)
            rank.load_parts([state.decode_part(files[state.part_name(replica)]) for replica in rank.parts_needed()])
        return other


@pytest.fixture
def trajectories(monkeypatch: pytest.MonkeyPatch) -> list[Trajectory]:
    """What trains, with its turns, in order."""
    kept: list[Trajectory] = []
    original = OpenResponses.trajectory

    def keeping(self: OpenResponses, *arguments: Any) -> Trajectory:
        kept.append(original(self, *arguments))
        return kept[-1]

    monkeypatch.setattr(OpenResponses, "trajectory", keeping)
    return kept


def name_of(found: Trajectory) -> tuple[str, int]:
    return found.request.prompt_id, found.request.sample_index


def check_dialogue(found: Trajectory) -> None:
    """The environment, asked anew about each turn of the whole response, gives the rewards, observations and end that were recorded."""
    name = found.request.prompt_id.partition("#")[0]
    texts: list[str] = []
    starts = [turn.start for turn in found.turns[1:]]
    for number, turn in enumerate(found.turns):
        ids = found.token_ids[turn.start : turn.end]
        texts.append(Letters().decode(ids, skip_special_tokens=True))
        assert EOS not in ids[:-1] and found.logprobs[turn.start : turn.end] == [-0.5 * token for token in ids]
        last = number == len(found.turns) - 1
        if ids[-1] != EOS:
            assert last and found.finish_reason == ("length" if sum(found.sampled) == LONGEST else "cut") and turn.reward == 0
            continue
        said = reply(TurnRequest(tuple(texts), PROBLEMS[name].ground_truth, {"sample_seed": found.request.seed}))
        assert (turn.reward, said.error) == (said.observation.reward, found.error if last else None)
        if not last or found.finish_reason == "cut":
            assert said.observation.text is not None
            written = found.token_ids[turn.end : starts[number] if not last else len(found.token_ids)]
            assert written == FORMAT.encode(said.observation.text, open_turn=True)[0]
        elif said.error is None and said.observation.text is not None:
            assert found.finish_reason == ("turns" if len(found.turns) == TURNS else "length")
        else:
            assert found.finish_reason == "stop"
    flags = [any(turn.start <= place < turn.end for turn in found.turns) for place in range(len(found.token_ids))]
    assert found.sampled == flags
    assert all(logprob == 0 for logprob, mine in zip(found.logprobs, flags, strict=True) if not mine)
    assert sum(tokens for tokens, _ in found.segments) == sum(flags) <= LONGEST
    assert sum(tokens for _, tokens in found.observations) == len(flags) - sum(flags)


@pytest.mark.parametrize(("estimator", "train"), [("gae", "completed"), ("gae", "segments"), ("grpo", "completed")])
def test_no_token_turn_or_reward_is_lost_at_a_cut(estimator: str, train: str, trajectories: list[Trajectory]) -> None:
    run = TurnsRun(with_turns({**SMALL, "train": train}, estimator), replicas=2).do(STEPS)
    for found in trajectories:
        check_dialogue(found)
    ended = [found for found in trajectories if found.finish_reason != "cut"]
    assert {found.finish_reason for found in ended} == {"stop", "length", "turns"} and any(found.error for found in ended)
    names = [name_of(found) for found in ended]
    waiting = [(response.prompt.prompt_id, response.sample_index) for response in run.ranks[0].table]
    expected = [(prompt.prompt_id, sample) for prompt in Run(run.config, 1).prompts(run.drawn) for sample in range(3)]
    assert sorted(names + waiting) == sorted(expected)
    assert all(tokens == 4 for found in ended for tokens, _ in found.segments[:-1])  # the budget is of sampled tokens
    assert any(found.observations_cut for found in ended)
    cuts = [found for found in trajectories if found.finish_reason == "cut"]
    assert {found.sampled[-1] for found in cuts} == ({True, False} if train == "segments" else set())  # in a turn, and between two
    if train == "segments":
        seen: dict[tuple[str, int], tuple[int, float]] = {}
        for found in trajectories:  # each sampled token and each turn's reward is in the segment of exactly one step
            tokens, rewards = seen.get(name_of(found), (0, 0.0))
            assert tokens == sum(size for size, age in found.segments if age > 0)
            assert rewards == sum(turn.reward for turn in found.turns if sum(found.sampled[: turn.end]) <= tokens)
            seen[name_of(found)] = sum(found.sampled), sum(turn.reward for turn in found.turns)
        assert sum(tokens for tokens, _ in seen.values()) == sum(counts.sampled for _, counts in run.log)


@pytest.mark.parametrize("replicas", [1, 3])
def test_turns_do_not_depend_on_the_number_of_replicas_nor_on_a_resume(replicas: int) -> None:
    config = with_turns({**SMALL, "train": "segments"})
    whole = TurnsRun(config, 2).do(STEPS)
    assert TurnsRun(config, replicas).do(STEPS).log == whole.log
    first = TurnsRun(config, 2).do(11)
    dialogues = [response.dialogue for response in first.ranks[0].table]
    assert {dialogue.in_turn for dialogue in dialogues if dialogue is not None} == {True, False}
    again = first.resumed(replicas)
    assert [response.dialogue for response in again.ranks[0].table] == dialogues
    assert again.do(STEPS - 11).log == whole.log[11:]
    assert sum(whole.moved) > 0


@pytest.mark.parametrize("tokens", [LONGEST, LONGEST + 5])
def test_a_horizon_as_long_as_responses_plays_what_a_run_without_one_plays(tokens: int, trajectories: list[Trajectory]) -> None:
    run = TurnsRun(with_turns({"tokens": tokens}), replicas=2)
    asked: list[GenerationRequest] = []

    def asking(requests: Sequence[GenerationRequest], _: SamplingConfig) -> list[Generation]:
        asked.extend(requests)
        return [generate(request) for request in requests]

    for step in (1, 2):
        fresh = list(run.prompts(run.ranks[0].vacancies))
        table = run.ranks[0].opened(fresh, step)
        first = [episode for rank in run.ranks for episode in rank.episodes(table, step, run.multi_turn)[0]]
        requests = [episode.request for episode in first]
        prompts = [prompt for prompt in fresh for _ in range(3)]
        plain = run.multi_turn.play(requests, prompts, SAMPLING, asking, lambda turns: [reply(t) for t in turns])
        run.do(1)
        found = trajectories[-12:]
        assert [len(one.segments) for one in found] == [1] * 12
        assert sorted((replace(one, segments=()) for one in found), key=name_of) == sorted(plain, key=name_of)
        assert not run.ranks[0].table


def test_reprefilled_tokens_are_those_that_an_engine_had_read() -> None:
    """An observation after which the response was cut is read for the first time."""
    run = TurnsRun(with_turns(SMALL), replicas=1).do(3)
    open_ones = [response for response in run.ranks[0].table if response.finish_reason is None]
    trailing = [response.dialogue.behind_turns for response in open_ones if response.dialogue is not None]
    assert any(trailing) and not all(trailing)
    expected = sum(3 + response.size for response in open_ones) - sum(trailing)
    run.do(1)
    assert run.log[-1][1].reprefilled == expected


def test_checkpoints_without_turns_are_read() -> None:
    run = Run(configured(SMALL), replicas=1).do(2)
    saved, files = run.saved()
    rows = [{name: value for name, value in row.items() if name != "dialogue"} for row in saved["responses"]]
    other = OpenResponses(run.config, replica=0, replicas=1, prompts=PROBLEMS)
    other.load_state_dict({**saved, "responses": rows})
    other.load_parts([state.decode_part(files["replica_00000.safetensors"])])
    assert other.table == run.ranks[0].table


def test_open_responses_that_the_settings_cannot_continue_are_refused() -> None:
    def load(run: Run, config: Config) -> OpenResponses:
        saved, _ = run.saved()
        other = OpenResponses(config, replica=0, replicas=1)
        other.prompts = PROBLEMS
        other.load_state_dict(saved)
        return other

    played, plain = TurnsRun(with_turns(SMALL), replicas=1).do(3), Run(configured(SMALL), replicas=1)
    while (longest := max((response.length for response in plain.ranks[0].table), default=0)) < 24:
        plain.do(1)
    with pytest.raises(CheckpointError, match=r"\d+ open responses that were sampled with rollout.environment, .* --restart-data"):
        load(played, plain.config)
    with pytest.raises(CheckpointError, match=r"\d+ open responses that were sampled without rollout.environment, which a run with it"):
        load(plain, played.config)
    with pytest.raises(CheckpointError, match=rf"of up to {longest} tokens, to which rollout.max_response_length = {longest} leaves none"):
        load(plain, configured(SMALL, max_response_length=longest))
    assert load(plain, configured(SMALL, max_response_length=longest + 1)).unfinished == plain.ranks[0].unfinished


def test_a_response_with_more_turns_than_a_lowered_limit_has_one_more() -> None:
    """Of a resumed run whose max_turns is now 2: a response that waits for its fourth turn gets it, and ends."""
    settings = EnvironmentConfig(**{**ENVIRONMENT, "max_turns": 2})
    multi_turn = MultiTurn(settings, FORMAT)
    ids = ids_of("a<eos>[x]b<eos>[y]c<eos>[z]")
    dialogue = Dialogue((Turn(0, 2), Turn(5, 7), Turn(10, 12)), 9, False, 0, None)
    episode = multi_turn.resumed(GenerationRequest("p", 0, [2], 7), 8, 20, ids, [0.0] * len(ids), dialogue)
    multi_turn.advance(
        [episode],
        [PROBLEMS["set/1"]],
        SAMPLING,
        lambda requests, _: [Generation(request, ids_of("d<eos>"), [-1.0] * 2, "stop") for request in requests],
        lambda turns: [Reply(Observation("on", 0.5)) for _ in turns],
    )
    assert (episode.finish_reason, len(episode.turns), episode.turns[-1].reward) == ("turns", 4, 0.5)


def resumed(tokenizer: Any, stop_texts: tuple[str, ...], before: list[int], then: list[int]) -> tuple[Any, list[TurnRequest]]:
    """A response whose only turn was cut after ``before``; the engine goes on with ``then`` and ends, and the environment is asked."""
    form = ObservationFormat(ControlTokens.of(tokenizer, chat_template=False, kwargs={}), (), (), (), None, (), 8)
    multi_turn = MultiTurn(SETTINGS, form, StopTexts(tokenizer, stop_texts) if stop_texts else None)
    dialogue = Dialogue((Turn(0, len(before)),), 0, True, 0, None)
    episode = multi_turn.resumed(GenerationRequest("p", 0, [2], 7), 8, 20, list(before), [-1.0] * len(before), dialogue)
    asked: list[TurnRequest] = []

    def respond(requests: Sequence[TurnRequest]) -> list[Reply]:
        asked.extend(requests)
        return [Reply(Observation(None)) for _ in requests]

    def engine(requests: Sequence[GenerationRequest], _: SamplingConfig) -> list[Generation]:
        return [Generation(request, list(then), [-2.0] * len(then), "length") for request in requests]

    multi_turn.advance([episode], [PROBLEMS["set/1"]], SAMPLING, engine, respond)
    return episode, asked


def test_a_stop_text_over_a_cut_ends_the_turn() -> None:
    episode, asked = resumed(Letters(), ("cd",), ids_of("abc"), ids_of("dex"))
    assert (episode.token_ids, episode.logprobs) == (ids_of("abcd"), [-1.0] * 3 + [-2.0])
    assert [request.turns for request in asked] == [("abcd",)]
    assert (episode.finish_reason, episode.in_turn, len(episode.turns)) == ("stop", False, 1)


def test_a_character_over_a_cut_is_whole_for_the_environment() -> None:
    """Three tokens write a euro sign; the cut is after the first."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({text: number for number, text in enumerate([*pieces, "<eos>"])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    ids = tokenizer.encode("5\u20ac;7", add_special_tokens=False)
    _, asked = resumed(tokenizer, (";",), ids[:2], ids[2:])
    assert [request.turns for request in asked] == [("5\u20ac;",)]
