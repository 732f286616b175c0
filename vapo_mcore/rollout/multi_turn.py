"""Multi-turn generation: generate a turn, query the environment, append its observation, and generate the next turn.

Sampled ids are never re-encoded; each observation is encoded once, separately. Each turn is one engine call for all unfinished
responses, whose prompt consists of the original prompt and all turns and observations so far (mostly served by the engine's prefix
cache).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vapo_mcore.config.schema import EnvironmentConfig
from vapo_mcore.data.chat_template import ControlTokens, end_of_turn, turn_parts
from vapo_mcore.environments.types import Reply, TurnRequest, with_sample_seed
from vapo_mcore.errors import ConfigError
from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig, Trajectory, TrajectoryEnd, Turn
from vapo_mcore.rollout.stopping import StopTexts

_PLACE = "{observation}"

Generate = Callable[[Sequence[GenerationRequest], SamplingConfig], list[Generation]]
"""The engine's method; fails on all ranks of a replica, or on none."""

Respond = Callable[[Sequence[TurnRequest]], list[Reply]]
"""Function that returns the environment's replies to responses; every rank of a replica gets the same replies."""


class Subject(Protocol):
    """The part of a prompt that is passed to an environment."""

    @property
    def ground_truth(self) -> str: ...
    @property
    def metadata(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ObservationFormat:
    """Tokens around an observation.

    ``before`` follows a turn that ended with the chat template's ``end_of_turn`` token (None: the template has none); ``before_open``
    follows a turn that ended with another token and begins with the template's end of turn. ``control``: control tokens, whose names in
    an observation are encoded as plain text.
    """

    control: ControlTokens
    before: tuple[int, ...]
    before_open: tuple[int, ...]
    after: tuple[int, ...]
    end_of_turn: int | None
    stop_token_ids: tuple[int, ...]
    limit: int

    @classmethod
    def build(
        cls, tokenizer: Any, settings: EnvironmentConfig, *, chat_template: bool, kwargs: dict[str, Any] | None = None
    ) -> ObservationFormat:
        """Build the format from the configured text or the chat template. Raises ConfigError if the tokenizer does not support it."""
        ended = opened = ""
        kwargs = kwargs or {}
        end = end_of_turn(tokenizer, kwargs) if chat_template else None
        if settings.format is not None:
            ended, _, after = settings.format.partition(_PLACE)
            opened = ended
        elif chat_template:
            parts = turn_parts(tokenizer, kwargs)
            if parts is None:
                raise ConfigError(
                    "rollout.environment.format: the tokenizer's chat template does not reproduce a second user turn verbatim; give "
                    "the text around {observation} here"
                )
            opened, after = parts
            ended = opened if end is None else opened.lstrip().removeprefix(end.text)
        else:
            after = ""
        encode = lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()  # noqa: E731
        made = cls(
            ControlTokens.of(tokenizer, chat_template=chat_template, kwargs=kwargs),
            encode(ended),
            encode(opened),
            encode(after),
            None if end is None else end.token_id,
            _stop_ids(tokenizer, settings.stop_tokens),
            settings.max_observation_length,
        )
        around = max(len(made.before), len(made.before_open)) + len(made.after)
        if around >= made.limit:
            raise ConfigError(
                f"rollout.environment.max_observation_length = {made.limit}: the text around an observation alone has {around} tokens; "
                "raise the limit, or change the format"
            )
        return made

    def encode(self, observation: str, *, open_turn: bool) -> tuple[list[int], bool]:
        """Return the token ids to append, and whether the observation was truncated. Names of special tokens become plain text."""
        before = self.before_open if open_turn else self.before
        ids = self.control.encode_plain(observation)
        room = self.limit - len(before) - len(self.after)
        return [*before, *ids[:room], *self.after], len(ids) > room


def _stop_ids(tokenizer: Any, tokens: Sequence[str]) -> tuple[int, ...]:
    known = tokenizer.get_vocab()
    unknown = [token for token in tokens if token not in known]
    if unknown:
        raise ConfigError(f"rollout.environment.stop_tokens: not tokens of the model's vocabulary: {', '.join(map(repr, unknown))}")
    return tuple(known[token] for token in tokens)


@dataclass(frozen=True)
class Dialogue:
    """The turns of a response that several steps sample (``rollout.horizon``).

    Attributes:
        turns: the model's turns so far.
        observed: tokens of the environment so far.
        in_turn: whether the newest turn was cut and continues.
        observations_cut: number of observations truncated to their limit.
        error: why the environment gave no reply, which ends the response.
    """

    turns: tuple[Turn, ...]
    observed: int
    in_turn: bool
    observations_cut: int
    error: str | None

    @property
    def behind_turns(self) -> int:
        """Number of tokens of an observation at the end, which no turn follows yet."""
        return self.observed + sum(turn.end - turn.start for turn in self.turns) - self.turns[-1].end

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"turns": [[turn.start, turn.end, turn.reward] for turn in self.turns]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Dialogue:
        turns = tuple(Turn(int(start), int(end), float(reward)) for start, end, reward in state["turns"])
        return cls(**{**state, "turns": turns})


@dataclass
class Episode:
    """One unfinished response.

    Attributes:
        request: its prompt; the environment's randomness depends on its seed.
        seed: the turns sampled in this step depend on it.
        limit: sampled tokens, those of earlier steps included, at which this step cuts the response.
        finish_reason: None while it continues.
        in_turn: whether the newest turn was cut.
    """

    request: GenerationRequest
    seed: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: TrajectoryEnd | None = None
    in_turn: bool = False
    observations_cut: int = 0
    error: str | None = None
    experts: list[Tensor] = field(default_factory=list)

    @property
    def tokens_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    def next_request(self) -> GenerationRequest:
        """Return the request of the next turn, or of the rest of one that was cut, with everything so far as its prompt."""
        number = len(self.turns) - self.in_turn
        return replace(
            self.request,
            prompt_token_ids=[*self.request.prompt_token_ids, *self.token_ids],
            seed=turn_seed(self.seed, number),
            max_tokens=self.limit - self.tokens_sampled,
        )

    def turn_request(self, subject: Subject) -> TurnRequest:
        """Return the environment's view of the turns so far, with the response's seed (not the turn's)."""
        return TurnRequest(tuple(self.texts), subject.ground_truth, with_sample_seed(subject.metadata, self.request.seed))

    def take(self, generation: Generation, tokenizer: Any, stop_texts: StopTexts | None, longest: int) -> None:
        """Append what the engine sampled. ``longest``: limit on the sampled tokens of the whole response."""
        ids, logprobs, finish = generation.token_ids, generation.logprobs, generation.finish_reason
        start = self.turns.pop().start if self.in_turn else len(self.token_ids)
        if self.in_turn:
            self.texts.pop()
            end = None if stop_texts is None else stop_texts.end_over_cut(self.token_ids[start:], ids)
            if end is not None:
                ids, logprobs, finish = ids[:end], logprobs[:end], "stop"
        if generation.experts is not None:  # of the earlier tokens, those with which they were sampled or first read are kept
            self.experts.append(generation.experts[sum(map(len, self.experts)) :])
        self.token_ids += ids
        self.logprobs += logprobs
        self.turns.append(Turn(start, len(self.token_ids)))
        self.texts.append(tokenizer.decode(self.token_ids[start:], skip_special_tokens=True))
        self.in_turn = finish == "length" and self.limit <= self.tokens_sampled < longest
        self.finish_reason = None if self.in_turn else finish

    def observe(self, token_ids: list[int], *, cut: bool) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.observations_cut += cut
        self.finish_reason = None

    def dialogue(self) -> Dialogue:
        observed = len(self.token_ids) - self.tokens_sampled
        return Dialogue(tuple(self.turns), observed, self.in_turn, self.observations_cut, self.error)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            self.request,
            self.token_ids,
            self.logprobs,
            sampled_by_model(self.turns, len(self.token_ids)),
            self.finish_reason or "cut",
            tuple(self.turns),
            self.observations_cut,
            self.error,
            experts=torch.cat(self.experts) if self.experts else None,
        )


def sampled_by_model(turns: Sequence[Turn], tokens: int) -> list[bool]:
    """Return for each of a response's ``tokens`` whether it belongs to a turn of the model."""
    flags = [False] * tokens
    for turn in turns:
        flags[turn.start : turn.end] = [True] * (turn.end - turn.start)
    return flags


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: the response's seed for the first, a hash of it for later ones."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\x00turn\x00{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class MultiTurn:
    """Generates multi-turn responses with an environment. All ranks of a replica must make the same calls with the same arguments."""

    def __init__(self, settings: EnvironmentConfig, observation_format: ObservationFormat, stop_texts: StopTexts | None = None) -> None:
        """``stop_texts``: those of the engine, for turns that are cut inside such a text."""
        self.settings = settings
        self.format = observation_format
        self.stop_texts = stop_texts

    def play(
        self,
        requests: Sequence[GenerationRequest],
        subjects: Sequence[Subject],
        sampling: SamplingConfig,
        generate: Generate,
        respond: Respond,
    ) -> list[Trajectory]:
        """Generate complete responses, in order; arguments as of ``advance``."""
        episodes = [Episode(request, request.seed, sampling.max_tokens) for request in requests]
        self.advance(episodes, subjects, sampling, generate, respond)
        return [episode.trajectory() for episode in episodes]

    def resumed(
        self, request: GenerationRequest, seed: int, limit: int, token_ids: list[int], logprobs: list[float], dialogue: Dialogue
    ) -> Episode:
        """Return the episode of a response that earlier steps began; arguments as the attributes of ``Episode`` and ``Dialogue``."""
        decode = self.format.control.tokenizer.decode
        texts = [decode(token_ids[turn.start : turn.end], skip_special_tokens=True) for turn in dialogue.turns]
        turns, cut = list(dialogue.turns), dialogue.observations_cut
        return Episode(request, seed, limit, token_ids, logprobs, turns, texts, in_turn=dialogue.in_turn, observations_cut=cut)

    def advance(
        self,
        episodes: Sequence[Episode],
        subjects: Sequence[Subject],
        sampling: SamplingConfig,
        generate: Generate,
        respond: Respond,
    ) -> None:
        """Play all episodes until each has ended or is cut, in place.

        A response ends when the environment ends it or fails, when its sampled tokens reach ``sampling.max_tokens``, or after
        ``max_turns`` turns. The environment also rewards the last turn; its observation is then ignored. A response is cut at the
        episode's ``limit``: inside a turn or, where a turn ends there, after the environment's reply to it.
        """
        sampling = replace(sampling, stop_token_ids=self.format.stop_token_ids)
        playing = list(range(len(episodes)))
        while playing:
            generations = generate([episodes[i].next_request() for i in playing], sampling)
            sampling = replace(sampling, continues=True)  # the next turns begin with the text so far, which the engine has cached
            for i, generation in zip(playing, generations, strict=True):
                episodes[i].take(generation, self.format.control.tokenizer, self.stop_texts, sampling.max_tokens)
            asked = [i for i in playing if episodes[i].finish_reason == "stop"]
            replies = respond([episodes[i].turn_request(subjects[i]) for i in asked])
            goes_on = [self._answer(episodes[i], reply, sampling.max_tokens) for i, reply in zip(asked, replies, strict=True)]
            playing = [i for i, on in zip(asked, goes_on, strict=True) if on]

    def _answer(self, episode: Episode, reply: Reply, longest: int) -> bool:
        """Process the reply to the newest turn; returns whether another turn follows in this step."""
        episode.error = reply.error
        episode.turns[-1] = replace(episode.turns[-1], reward=reply.observation.reward)
        text = reply.observation.text
        if reply.error is not None or text is None:
            return False
        last = len(episode.turns) >= self.settings.max_turns  # above it: a resumed run may have lowered the limit
        if last or episode.tokens_sampled >= longest:
            episode.finish_reason = "turns" if last else "length"
            return False
        open_turn = episode.token_ids[-1] != self.format.end_of_turn
        token_ids, cut = self.format.encode(text, open_turn=open_turn)
        episode.observe(token_ids, cut=cut)
        return episode.tokens_sampled < episode.limit
