"""Common base of the rollout engines: states, checks of requests and tensor names, and weight-sync bookkeeping."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ExpertChoices, read_architecture
from vapo_mcore.config.engines import EngineTraits
from vapo_mcore.errors import EngineFailure, RolloutError, VapoError
from vapo_mcore.rollout.base import (
    EngineBuild,
    EngineState,
    Generation,
    GenerationRequest,
    Replica,
    SamplingConfig,
    SyncReport,
    WeightBuckets,
)
from vapo_mcore.rollout.hf_folder import parameter_shapes
from vapo_mcore.rollout.weight_stream import WeightStream, require_same_names

_SHOWN = 5
_Result = TypeVar("_Result", bound=Sequence[Any])
logger = logging.getLogger(__name__)


class StatefulEngine(ABC):
    """Engine-independent part of a RolloutEngine.

    A subclass implements the abstract methods, and overrides the others and ``traits`` where the defaults do not fit.

    Args:
        replica: the replica that this rank belongs to.
        parameter_shapes: HF name -> shape of every tensor that a weight sync must deliver.
        vocab_size: rows of the embedding; prompt tokens must be below it.
        unknown_token_ids: ids below ``vocab_size`` that the tokenizer does not define; never sampled and excluded from the softmax.
        max_model_len: maximum tokens of prompt and response together.
        expert_choices: ``EngineBuild.expert_choices``, from an engine with the trait ``returns_experts``.
    """

    traits: ClassVar[EngineTraits] = EngineTraits()

    def __init__(
        self,
        replica: Replica,
        parameter_shapes: Mapping[str, tuple[int, ...]],
        *,
        vocab_size: int,
        max_model_len: int,
        unknown_token_ids: Sequence[int] = (),
        expert_choices: ExpertChoices | None = None,
    ) -> None:
        self.replica = replica
        self.parameter_shapes = dict(parameter_shapes)
        self.vocab_size = vocab_size
        self.unknown_token_ids = tuple(unknown_token_ids)
        self.max_model_len = max_model_len
        self.expert_choices = expert_choices
        self._state = EngineState.ASLEEP
        self._last_sync: SyncReport | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def replica_index(self) -> int:
        return self.replica.index

    @property
    def num_replicas(self) -> int:
        return self.replica.count

    @property
    def max_running(self) -> int | None:
        return None

    @property
    def is_replica_leader(self) -> bool:
        return self.replica.rank_in_replica == 0

    @property
    def last_sync(self) -> SyncReport | None:
        return self._last_sync

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        self._require("generate", EngineState.READY)
        self._check_requests(requests, sampling)
        if sampling.return_experts and self.expert_choices is None:
            raise RolloutError(f"rollout engine: {type(self).__name__} was not built to return experts (EngineBuild.expert_choices)")

        def generate() -> list[Generation]:
            generations = self._generate(requests, sampling)
            if sampling.return_experts and self.is_replica_leader:
                for generation in generations:
                    self._check_experts(generation)
            return generations

        return self._running(generate) if requests else []

    def distributions(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        self._require("distributions", EngineState.READY)
        requests = [GenerationRequest(f"sequence {number}", 0, ids, 0) for number, ids in enumerate(sequences)]
        self._check_requests(requests, SamplingConfig(1.0, 1.0, -1, 1))
        return self._running(lambda: self._distributions(sequences)) if requests else []

    def _running(self, run: Callable[[], _Result]) -> _Result:
        """Return the result of ``run``; any exception becomes EngineFailure and leaves the engine ``BROKEN``."""
        self._state = EngineState.BROKEN
        try:
            result = run()
        except Exception as error:  # any exception of a library leaves the engine in an unknown state
            logger.warning("generation failed", exc_info=error)
            failure = f"{type(error).__name__}: {error}"
            self._meet(failure, ())
            raise EngineFailure(failure) from error
        difference = self._meet(None, result)
        if difference is not None:
            raise EngineFailure(difference)
        self._state = EngineState.READY
        return result

    def rebuild(self) -> None:
        """See RolloutEngine. Raises RolloutError if no new engine can be created."""
        self._state = EngineState.BROKEN
        try:
            self._rebuild()
        except VapoError:
            raise
        except Exception as error:  # any exception of a library
            logger.warning("the rollout engine could not be rebuilt", exc_info=error)
            raise RolloutError(f"no new rollout engine: {type(error).__name__}: {error}") from error
        self._state = EngineState.ASLEEP

    def discard(self) -> None:
        """See RolloutEngine."""
        self._state = EngineState.BROKEN
        self._discard()

    def update_weights(
        self, buckets: WeightBuckets, expected_names: Collection[str], *, checksum: Callable[[Tensor], str] | None = None
    ) -> SyncReport:
        """See RolloutEngine. Wrong names leave the engine unchanged, without weights; an interrupted load leaves it ``BROKEN``."""
        self._require("update_weights", EngineState.WEIGHTS_AWAKE)
        require_same_names(expected_names, self.parameter_shapes)
        start = time.perf_counter()
        stream = WeightStream(buckets, self.parameter_shapes, checksum)
        self._state = EngineState.BROKEN
        self._load_weights(stream)
        self._state = EngineState.WEIGHTS_AWAKE
        stream.finish()
        seconds = time.perf_counter() - start
        self._last_sync = SyncReport(stream.names, stream.bytes, seconds, seconds - stream.produce_seconds, stream.checksums)
        self._state = EngineState.WEIGHTS_LOADED
        return self._last_sync

    def holds(self, name: str, tensor: Tensor) -> bool | None:
        self._require("holds", EngineState.WEIGHTS_LOADED, EngineState.READY)
        return self._holds(name, tensor)

    def sleep(self) -> None:
        self._require("sleep", EngineState.WEIGHTS_AWAKE, EngineState.WEIGHTS_LOADED, EngineState.READY)
        self._sleep()
        self._state = EngineState.ASLEEP

    def wake_weights(self) -> None:
        self._require("wake_weights", EngineState.ASLEEP)
        self._wake_weights()
        self._state = EngineState.WEIGHTS_AWAKE

    def wake_kv_cache(self) -> None:
        self._require("wake_kv_cache", EngineState.WEIGHTS_LOADED)
        self._wake_kv_cache()
        self._state = EngineState.READY

    @classmethod
    def build(cls, build: EngineBuild) -> Self:
        """Build the engine of this rank, asleep. All ranks call this together. Override it for a constructor with other arguments."""
        return cls(
            build.replica,
            parameter_shapes(build.folder),
            vocab_size=read_architecture(build.folder).vocab_size,
            max_model_len=build.max_model_len,
            unknown_token_ids=build.unknown_token_ids,
            expert_choices=build.expert_choices,
        )

    def settings(self) -> dict[str, Any]:
        return {"engine": type(self).__qualname__}

    @abstractmethod
    def _generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]: ...

    @abstractmethod
    def _distributions(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]: ...

    @abstractmethod
    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    @abstractmethod
    def _holds(self, name: str, tensor: Tensor) -> bool | None: ...

    @abstractmethod
    def _sleep(self) -> None:
        """Free the weights and the KV cache."""

    def _wake_weights(self) -> None:
        """Allocate what ``_sleep`` freed of the weights. By default ``_load_weights`` allocates it."""
        return

    def _wake_kv_cache(self) -> None:
        """Allocate the KV cache. By default it exists only during generation."""
        return

    def _discard(self) -> None:
        """Free everything, whatever state an interrupted call left."""
        self._sleep()

    def _meet(self, failure: str | None, result: Sequence[Any]) -> str | None:
        """Wait for the replica's other ranks after a call; returns a message on all of them if their results differ.

        ``failure``: why the call failed on this rank. By default the ranks do not depend on each other.
        """
        return None

    def _rebuild(self) -> None:
        """Replace what an interrupted call may have broken. By default only the weights outlive a call."""
        self._discard()

    def _require(self, call: str, *allowed: EngineState) -> None:
        if self._state not in allowed:
            needed = " or ".join(state.name for state in allowed)
            raise RolloutError(f"rollout engine: {call} needs state {needed}, but the engine is {self._state.name} ({self._state.value})")

    def _check_experts(self, generation: Generation) -> None:
        """Raise RolloutError with both counts unless a response has the experts of all its tokens but the last, in every layer."""
        shape, found, request = self.expert_choices, generation.experts, generation.request
        assert shape is not None
        tokens = len(request.prompt_token_ids) + len(generation.token_ids) - 1
        expected, dtype = [tokens, shape.layers, shape.topk], torch.uint8 if shape.itemsize == 1 else torch.int16
        what = f"the engine's experts of the response to {request.prompt_id!r} (sample {request.sample_index})"
        wanted = f"{dtype} of {tokens} tokens x {shape.layers} layers x {shape.topk} experts"
        if found is None:
            raise RolloutError(f"{what} are missing, expected {wanted} (model.router.replay: engine)")
        if list(found.shape) != expected or found.dtype != dtype:
            sizes = " x ".join(f"{size} {name}" for size, name in zip(found.shape, ("tokens", "layers", "experts"), strict=False))
            raise RolloutError(f"{what} are {found.dtype} of {sizes}, expected {wanted}")
        if int(found.max()) >= shape.experts or int(found.min()) < 0:
            raise RolloutError(f"{what} have numbers from {int(found.min())} to {int(found.max())}; the model has {shape.experts} experts")
        if shape.topk > 1 and bool((found[..., 0] == found[..., 1]).any()):  # zeros, for example; a full check would take minutes
            raise RolloutError(f"{what} name an expert twice for a token of a layer: the engine did not record every layer")

    def _check_requests(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> None:
        """Raise RolloutError naming the first requests that are empty, too long or have invalid token ids."""
        faults = []
        for request in requests:
            length = len(request.prompt_token_ids)
            if length == 0:
                faults.append(f"{request.prompt_id!r}: empty prompt")
            elif length + request.limit(sampling) > self.max_model_len:
                faults.append(
                    f"{request.prompt_id!r}: {length} prompt tokens + max_tokens = {request.limit(sampling)} exceed "
                    f"the engine's {self.max_model_len}"
                )
            elif max(request.prompt_token_ids) >= self.vocab_size or min(request.prompt_token_ids) < 0:
                faults.append(f"{request.prompt_id!r}: a token id outside the model's vocabulary of {self.vocab_size}")
        if faults:
            more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise RolloutError(f"{len(faults)} of {len(requests)} requests cannot be generated: {'; '.join(faults[:_SHOWN])}{more}")
