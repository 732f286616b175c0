"""Interface of rollout engines: requests, results, states and the engine protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vapo_mcore.errors import RolloutError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from vapo_mcore.config.architecture import ExpertChoices
    from vapo_mcore.config.schema import RolloutConfig
    from vapo_mcore.rollout.stopping import StopTexts

FinishReason = Literal["stop", "length"]
TrajectoryEnd = Literal["stop", "length", "turns", "cut"]

GREEDY = 0.0
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM's bounds, kept by every engine


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample.

    ``prompt_token_ids`` are passed to the model unchanged; ``seed``: see ``seeds.sampling_seed``; ``max_tokens``: limit for this
    response, if lower than that of the sampling settings.
    """

    prompt_id: str
    sample_index: int
    prompt_token_ids: Sequence[int]
    seed: int
    max_tokens: int | None = None

    def limit(self, sampling: SamplingConfig) -> int:
        """Return the maximum number of tokens to sample for this request."""
        return sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Sampling settings: logits / temperature, then the ``top_k`` most likely tokens, then the smallest set with mass ``top_p``.

    Temperature 0 is greedy and ignores ``top_p`` and ``top_k``. Values between 0 and 0.01, for which vLLM would silently use 0.01, and
    above 2 are rejected. ``top_k`` -1 keeps all tokens. ``max_tokens`` counts the response's tokens including EOS. ``stop_token_ids``
    end a response in addition to the model's stop tokens. ``return_experts``: return the experts that a mixture chose, too.
    ``continues``: the requests continue those of the call before (a further turn), so an engine may reuse what it cached of them.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    return_experts: bool = False
    continues: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.temperature != GREEDY and not LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE:
            faults.append(f"temperature = {self.temperature}: use 0 (greedy) or {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}")
        if not 0.0 < self.top_p <= 1.0:
            faults.append(f"top_p = {self.top_p}: use a number in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            faults.append(f"top_k = {self.top_k}: use -1 (all tokens) or at least 1")
        if self.max_tokens < 1:
            faults.append(f"max_tokens = {self.max_tokens}: use at least 1")
        if faults:
            raise RolloutError("sampling settings: " + "; ".join(faults))


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response.

    Attributes:
        token_ids: the sampled ids, including the stop token.
        logprobs: natural log-probability of each token under the distribution it was sampled from (after temperature, top-k and top-p).
        finish_reason: ``stop`` (a stop token was sampled) or ``length`` (truncated at ``max_tokens``).
        experts: uint8 (int16 with more than 256 experts) [prompt + response - 1, layers, topk], those that the engine chose for every
            token that it fed to the model: all but the last sampled one. Only on the replica's leader, and with ``return_experts``.
    """

    request: GenerationRequest
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: tokens ``start`` to ``end`` (exclusive) of the response, and the environment's reward for it."""

    start: int
    end: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A response: the model's turns, and the environment's observations between them.

    Attributes:
        token_ids: tokens of all turns and observations, in order; the last one was sampled by the model, unless the response was cut
            between two turns.
        logprobs: log-probs of sampled tokens as in ``Generation``, 0 at the environment's tokens.
        sampled: False at the environment's tokens.
        finish_reason: ``stop``, ``length`` (truncated at the limit on sampled tokens), ``turns`` (turn limit reached) or
            ``cut`` (continues in the next step: ``rollout.horizon``).
        turns: the model's turns, at least one.
        observations_cut: number of observations truncated to their limit.
        segments: (sampled tokens, age) of each part sampled in another step (``rollout.horizon``); empty: sampled in one step.
        error: why the environment gave no reply; the response then has no verdict.
        experts: as of ``Generation``, over prompt and response; those of the turn that fed a token first.
    """

    request: GenerationRequest
    token_ids: list[int]
    logprobs: list[float]
    sampled: list[bool]
    finish_reason: TrajectoryEnd
    turns: tuple[Turn, ...]
    observations_cut: int = 0
    error: str | None = None
    segments: tuple[tuple[int, int], ...] = ()
    experts: Tensor | None = None

    @property
    def observations(self) -> tuple[tuple[int, int], ...]:
        """(tokens that the model had sampled before, tokens) of each observation."""
        found, sampled = [], 0
        starts = [turn.start for turn in self.turns[1:]] + [len(self.token_ids)]
        for turn, start in zip(self.turns, starts, strict=True):
            sampled += turn.end - turn.start
            if start > turn.end:
                found.append((sampled, start - turn.end))
        return tuple(found)

    @classmethod
    def of_one_turn(cls, generation: Generation) -> Trajectory:
        """Wrap a generation without an environment."""
        length = len(generation.token_ids)
        return cls(
            generation.request,
            generation.token_ids,
            generation.logprobs,
            [True] * length,
            generation.finish_reason,
            (Turn(0, length),),
            experts=generation.experts,
        )


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Result of one weight synchronisation on this rank.

    Attributes:
        names: number of tensors received.
        bytes: their total size.
        seconds: duration of the whole call.
        load_seconds: the part spent in the engine's loader, excluding producing, checking and checksumming the tensors.
        checksums: name -> checksum of each tensor as received by the loader; None unless requested.
    """

    names: int
    bytes: int
    seconds: float
    load_seconds: float
    checksums: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Replica:
    """The engine replica that this rank belongs to: number ``index`` of ``count``, with ``size`` contiguous ranks."""

    index: int
    count: int
    size: int
    rank_in_replica: int

    @classmethod
    def of_rank(cls, rank: int, world_size: int, size: int) -> Replica:
        if world_size % size:
            raise RolloutError(f"rollout.tensor_parallel_size = {size} must divide the world size {world_size}")
        return cls(index=rank // size, count=world_size // size, size=size, rank_in_replica=rank % size)


@dataclass(frozen=True, kw_only=True)
class EngineBuild:
    """What an engine is built from.

    Attributes:
        config: the section ``rollout``.
        folder: Hugging Face model folder.
        dtype: dtype of the weights.
        replica: which replica this rank belongs to.
        rank: rank in the world.
        seed: seed, equal on all ranks.
        max_model_len: longest prompt and response together, in tokens.
        unknown_token_ids: ids of the model that the tokenizer lacks; they are never sampled.
        stop_ids: ids that end a response; None: the folder's stop tokens.
        stop_texts: texts that also end a response; None: none.
        expert_choices: shape of the experts that ``generate`` must return on request (``model.router.replay: engine``); None: no requests.
    """

    config: RolloutConfig
    folder: str | Path
    dtype: torch.dtype
    replica: Replica
    rank: int
    seed: int
    max_model_len: int
    unknown_token_ids: Sequence[int] = ()
    stop_ids: Sequence[int] | None = None
    stop_texts: StopTexts | None = None
    expert_choices: ExpertChoices | None = None


class EngineState(Enum):
    """State of an engine. States are entered in this order; ``sleep`` returns to ``ASLEEP`` from any state except ``BROKEN``."""

    ASLEEP = "asleep: no weights, no KV cache"
    WEIGHTS_AWAKE = "weights awake: room for weights, but their values are not valid"
    WEIGHTS_LOADED = "weights loaded: no KV cache"
    READY = "ready: weights loaded, KV cache awake"
    BROKEN = "broken: a weight sync or a generation was interrupted"


WeightBuckets = Iterable[list[tuple[str, "Tensor"]]]


class RolloutEngine(Protocol):
    """Generation and weight sync in the training processes.

    All ranks of a replica must make the same calls with the same arguments and get the same results. The order in a step is
    ``sleep`` -> (training) -> ``wake_weights`` -> ``update_weights`` -> ``wake_kv_cache`` -> ``generate`` (any number of times).
    A new engine is asleep and has no weights; it gets the first ones by ``update_weights`` too. Calls in the wrong state raise
    RolloutError.
    """

    @property
    def state(self) -> EngineState: ...

    @property
    def replica_index(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def is_replica_leader(self) -> bool: ...

    @property
    def max_running(self) -> int | None:
        """Maximum number of responses that a replica samples at a time; None: no limit."""
        ...

    @property
    def expert_choices(self) -> ExpertChoices | None:
        """Shape of the experts that ``generate`` can return; None: it returns none."""
        ...

    @property
    def last_sync(self) -> SyncReport | None: ...

    def settings(self) -> dict[str, Any]:
        """Return the engine's settings with resolved defaults, for the run's ``engine.json``."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        """Sample the responses to this replica's requests, in order.

        Raises RolloutError for invalid requests. Any other failure raises EngineFailure, possibly on this rank only, and leaves the
        engine ``BROKEN``; or EngineStuck, if the replica's other ranks wait inside the engine for this one.
        """
        ...

    def distributions(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the engine's log-probs of the whole vocabulary at temperature 1, for a few short sequences of token ids.

        Returns:
            float32 [len - 1, vocab_size] a sequence, on the host: row t is the distribution of token t + 1; -inf for ids that are never
            sampled. Errors as of ``generate``.
        """
        ...

    def rebuild(self) -> None:
        """Replace a broken engine by a new one, which is asleep. All ranks of all replicas must call it together."""
        ...

    def discard(self) -> None:
        """Shut down the engine and free its memory; it stays ``BROKEN``. All ranks of all replicas must call it, in any state."""
        ...

    def update_weights(
        self, buckets: WeightBuckets, expected_names: Collection[str], *, checksum: Callable[[Tensor], str] | None = None
    ) -> SyncReport:
        """Load weights from ``buckets`` of full tensors with HF names.

        ``expected_names``: the names the caller will deliver, which must equal the model's. ``checksum`` is applied to each tensor just
        before it is passed to the loader. Tensors must keep their values until the call returns.
        """
        ...

    def holds(self, name: str, tensor: Tensor) -> bool | None:
        """Return whether the engine's parameters equal this rank's part of a full HF tensor. Call after ``update_weights``.

        Returns None if the engine does not keep them in a readable form (vLLM on CPU repacks its matrices).
        """
        ...

    def sleep(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_kv_cache(self) -> None: ...
