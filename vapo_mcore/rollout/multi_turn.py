"""Multi-turn generation: generate a turn, query the environment, append its observation, and generate the next turn.

Sampled ids are never re-encoded; each observation is encoded once, separately. Each turn is one engine call for all unfinished
responses, whose prompt consists of the original prompt and all turns and observations so far (mostly served by the engine's prefix
cache).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vapo_mcore.config.schema import EnvironmentConfig
from vapo_mcore.data.chat_template import ControlTokens, end_of_turn, turn_parts
from vapo_mcore.environments.types import Reply, TurnRequest, with_sample_seed
from vapo_mcore.errors import ConfigError
from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig, Trajectory, TrajectoryEnd, Turn

_PLACE = "{observation}"

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


@dataclass
class _Episode:
    """One unfinished response."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: TrajectoryEnd = "stop"
    observations_cut: int = 0
    error: str | None = None
    experts: list[Tensor] = field(default_factory=list)

    @property
    def tokens_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)

    def next_request(self, budget: int) -> GenerationRequest:
        """Return the request of the next turn, with everything so far as its prompt and a separate seed."""
        number = len(self.turns)
        return replace(
            self.request,
            prompt_token_ids=[*self.request.prompt_token_ids, *self.token_ids],
            seed=turn_seed(self.request.seed, number),
            max_tokens=budget - self.tokens_sampled,
        )

    def turn_request(self, subject: Subject) -> TurnRequest:
        """Return the environment's view of the turns so far, with the response's seed (not the turn's)."""
        return TurnRequest(tuple(self.texts), subject.ground_truth, with_sample_seed(subject.metadata, self.request.seed))

    def take(self, generation: Generation, tokenizer: Any) -> None:
        start = len(self.token_ids)
        if generation.experts is not None:  # of the earlier tokens, those with which they were sampled or first read are kept
            self.experts.append(generation.experts[sum(map(len, self.experts)) :])
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.sampled += [True] * len(generation.token_ids)
        self.turns.append(Turn(start, len(self.token_ids)))
        self.texts.append(tokenizer.decode(generation.token_ids, skip_special_tokens=True))
        self.finish_reason = generation.finish_reason

    def observe(self, token_ids: list[int], *, cut: bool) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.sampled += [False] * len(token_ids)
        self.observations_cut += cut

    def trajectory(self) -> Trajectory:
        return Trajectory(
            self.request,
            self.token_ids,
            self.logprobs,
            self.sampled,
            self.finish_reason,
            tuple(self.turns),
            self.observations_cut,
            self.error,
            experts=torch.cat(self.experts) if self.experts else None,
        )


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: the response's seed for the first, a hash of it for later ones."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\x00turn\x00{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class MultiTurn:
    """Generates multi-turn responses with an environment. All ranks of a replica must call ``play`` with the same arguments."""

    def __init__(self, settings: EnvironmentConfig, observation_format: ObservationFormat) -> None:
        self.settings = settings
        self.format = observation_format

    def play(
        self,
        requests: Sequence[GenerationRequest],
        subjects: Sequence[Subject],
        sampling: SamplingConfig,
        generate: Callable[[Sequence[GenerationRequest], SamplingConfig], list[Generation]],
        respond: Respond,
    ) -> list[Trajectory]:
        """Generate complete responses, in order. ``generate`` is the engine's method, ``respond`` queries the environment.

        A response ends when the environment ends it or fails, when its sampled tokens reach ``sampling.max_tokens``, or after
        ``max_turns`` turns. The environment also rewards the last turn; its observation is then ignored.
        """
        sampling = replace(sampling, stop_token_ids=self.format.stop_token_ids)
        episodes = [_Episode(request) for request in requests]
        playing = list(range(len(episodes)))
        for turn in range(self.settings.max_turns):
            if not playing:
                break
            generations = generate([episodes[i].next_request(sampling.max_tokens) for i in playing], sampling)
            for i, generation in zip(playing, generations, strict=True):
                episodes[i].take(generation, self.format.control.tokenizer)
            asked = [i for i in playing if episodes[i].finish_reason == "stop"]
            replies = respond([episodes[i].turn_request(subjects[i]) for i in asked])
            last = turn == self.settings.max_turns - 1
            goes_on = [self._answer(episodes[i], reply, sampling.max_tokens, last=last) for i, reply in zip(asked, replies, strict=True)]
            playing = [i for i, on in zip(asked, goes_on, strict=True) if on]
        return [episode.trajectory() for episode in episodes]

    def _answer(self, episode: _Episode, reply: Reply, budget: int, *, last: bool) -> bool:
        """Process the reply to the newest turn; returns whether another turn follows."""
        episode.error = reply.error
        episode.turns[-1] = replace(episode.turns[-1], reward=reply.observation.reward)
        text = reply.observation.text
        if reply.error is not None or text is None:
            return False
        if last or episode.tokens_sampled >= budget:
            episode.finish_reason = "turns" if last else "length"
            return False
        open_turn = episode.token_ids[-1] != self.format.end_of_turn
        token_ids, cut = self.format.encode(text, open_turn=open_turn)
        episode.observe(token_ids, cut=cut)
        return True
