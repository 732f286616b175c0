"""What a rollout engine is: its requests, its results, its states and its interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vapo_mcore.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
TrajectoryEnd = Literal["stop", "length", "turns"]

GREEDY = 0.0
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM's bounds, kept by every engine


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to be sampled. ``prompt_token_ids`` are given to the model as they are; ``seed`` as of ``seeds.sampling_seed``;
    ``max_tokens``: of this response, where it is less than the sampling settings'."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: Sequence[int]
    seed: int
    max_tokens: int | None = None

    def limit(self, sampling: SamplingConfig) -> int:
        """Most tokens that may be sampled for this request."""
        return sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are drawn: logits / temperature, then the ``top_k`` likeliest, then the smallest set of mass ``top_p``.

    Temperature 0 is greedy (``top_p`` and ``top_k`` then do not matter); between 0 and 0.01 vLLM would silently use 0.01, so that is
    refused, as is more than 2. ``top_k`` -1 keeps all tokens. ``max_tokens`` counts the response's tokens, EOS included.
    ``stop_token_ids`` end a response besides the model's own stop tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()

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
        token_ids: the sampled ids, the stop token included.
        logprobs: of each sampled token under the distribution it was drawn from (temperature, top-k and top-p applied), natural log.
        finish_reason: ``stop`` (a stop token was sampled) or ``length`` (cut at ``max_tokens``).
    """

    request: GenerationRequest
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: tokens ``start`` to ``end`` (exclusive) of the response, and the environment's reward for it."""

    start: int
    end: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A whole response: the model's turns and, between them, what an environment wrote.

    Attributes:
        token_ids: of all turns and observations, in order; the last was sampled by the model.
        logprobs: of each sampled token as in ``Generation``, 0 at the environment's tokens.
        sampled: False at the environment's tokens.
        finish_reason: ``stop``, ``length`` (cut at the limit of sampled tokens) or ``turns`` (the environment would have gone on).
        turns: the model's turns, at least one.
        observations_cut: observations that were longer than their limit.
        error: why the environment gave no answer; the response then has no verdict.
    """

    request: GenerationRequest
    token_ids: list[int]
    logprobs: list[float]
    sampled: list[bool]
    finish_reason: TrajectoryEnd
    turns: tuple[Turn, ...]
    observations_cut: int = 0
    error: str | None = None

    @classmethod
    def of_one_turn(cls, generation: Generation) -> Trajectory:
        """A response without an environment."""
        length = len(generation.token_ids)
        return cls(
            generation.request,
            generation.token_ids,
            generation.logprobs,
            [True] * length,
            generation.finish_reason,
            (Turn(0, length),),
        )


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One weight synchronisation, as seen on this rank.

    Attributes:
        names: number of tensors received.
        bytes: their size.
        seconds: duration of the whole call.
        load_seconds: the part spent in the engine's own loader, not in producing, checking or summing the tensors.
        checksums: of each tensor as the loader received it, by name; None unless asked for.
    """

    names: int
    bytes: int
    seconds: float
    load_seconds: float
    checksums: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class Replica:
    """Which engine this rank is a worker of: replica ``index`` of ``count``, made of ``size`` contiguous ranks."""

    index: int
    count: int
    size: int
    rank_in_replica: int

    @classmethod
    def of_rank(cls, rank: int, world_size: int, size: int) -> Replica:
        if world_size % size:
            raise RolloutError(f"rollout.tensor_parallel_size = {size} must divide the world size {world_size}")
        return cls(index=rank // size, count=world_size // size, size=size, rank_in_replica=rank % size)


class EngineState(Enum):
    """What an engine holds; it moves through these in order, and from any but ``BROKEN`` back to ``ASLEEP``."""

    ASLEEP = "asleep: no weights, no KV cache"
    WEIGHTS_AWAKE = "weights awake: room for weights, but their values are not valid"
    WEIGHTS_LOADED = "weights loaded: no KV cache"
    READY = "ready: weights loaded, KV cache awake"
    BROKEN = "broken: a weight sync or a generation was interrupted"


WeightBuckets = Iterable[list[tuple[str, "Tensor"]]]


class RolloutEngine(Protocol):
    """Generation and weight sync in the training processes.

    All ranks of a replica make the same calls with the same arguments and get the same results. A step goes
    ``sleep`` -> (training) -> ``wake_weights`` -> ``update_weights`` -> ``wake_kv_cache`` -> ``generate`` (any number of times).
    A new engine is asleep and has never seen weights: the first ones arrive like all later ones. A call in any other state
    raises RolloutError.
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
    def last_sync(self) -> SyncReport | None: ...

    def settings(self) -> dict[str, Any]:
        """What the engine runs with, defaults resolved, for the record of the run (``engine.json``)."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        """The responses to this replica's requests, in their order.

        Raises RolloutError for requests that cannot be met, and EngineFailure, which leaves the engine ``BROKEN``, for everything else
        that goes wrong, on this rank alone maybe.
        """
        ...

    def rebuild(self) -> None:
        """Replace a broken engine by a new one, which is asleep and gets its weights as usual. All ranks of all replicas together."""
        ...

    def discard(self) -> None:
        """End the engine and give back all its memory; it stays ``BROKEN``. All ranks of all replicas together, in any state."""
        ...

    def update_weights(
        self, buckets: WeightBuckets, expected_names: Collection[str], *, checksum: Callable[[Tensor], str] | None = None
    ) -> SyncReport:
        """Take over HF-named weights, full tensors, from ``buckets``.

        ``expected_names`` is what the caller will deliver; it must be exactly what the model has. ``checksum`` is applied to each
        tensor just before the loader gets it. A tensor must keep its values until the call returns.
        """
        ...

    def holds(self, name: str, tensor: Tensor) -> bool | None:
        """Whether the engine's own parameters have exactly the values of a full HF tensor, this rank's part of it; None where the
        engine does not keep them readable (vLLM on CPU repacks its matrices). After ``update_weights``."""
        ...

    def sleep(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_kv_cache(self) -> None: ...
