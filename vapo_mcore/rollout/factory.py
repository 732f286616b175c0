"""Find and build the configured rollout engine, without falling back to another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.config.engines import BUILT_IN_ENGINES, EngineTraits
from vapo_mcore.errors import ConfigError
from vapo_mcore.extensions.loading import load_function
from vapo_mcore.rollout.base import EngineBuild, Replica, RolloutEngine

if TYPE_CHECKING:
    import torch

    from vapo_mcore.config.architecture import ExpertChoices
    from vapo_mcore.config.schema import Config, RolloutConfig
    from vapo_mcore.rollout.stateful import StatefulEngine
    from vapo_mcore.rollout.stopping import StopTexts


def engine_class(name: str) -> type[StatefulEngine]:
    """Return the class of a built-in engine, or the class at an import path. Raises ConfigError if that is not an engine."""
    from vapo_mcore.rollout.stateful import StatefulEngine

    found = load_function(BUILT_IN_ENGINES[name].reference if name in BUILT_IN_ENGINES else name)
    if not (isinstance(found, type) and issubclass(found, StatefulEngine)):
        raise ConfigError(f"rollout.engine: {name} is not a class derived from {StatefulEngine.__module__}.{StatefulEngine.__name__}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"rollout.engine: {name} does not implement {', '.join(missing)}")
    return found


def engine_traits(name: str) -> EngineTraits:
    """Return the traits of an engine, without importing a built-in one."""
    return BUILT_IN_ENGINES[name].traits if name in BUILT_IN_ENGINES else engine_class(name).traits


def ranks_of_replica(config: Config) -> int:
    """Return the number of ranks that hold one copy of the model during generation."""
    return config.rollout_tensor_parallel_size if engine_traits(config.rollout.engine).splits_model else 1


def build_rollout_engine(
    config: RolloutConfig,
    model_path: str | Path,
    dtype: torch.dtype,
    *,
    tensor_parallel_size: int,
    max_model_len: int,
    rank: int,
    world_size: int,
    seed: int,
    unknown_token_ids: Sequence[int] = (),
    stop_ids: Sequence[int] | None = None,
    stop_texts: StopTexts | None = None,
    expert_choices: ExpertChoices | None = None,
) -> RolloutEngine:
    """Build this rank's engine, asleep. All ranks must call this together, after initialising the process group.

    Args:
        tensor_parallel_size: ranks of a replica of an engine that splits the model (contiguous ranks); other engines use one rank.
        max_model_len: maximum tokens of prompt and response together.
        seed: must be equal on all ranks.
        unknown_token_ids: vocabulary ids that the tokenizer does not define; they are never sampled.
        stop_ids: ids that end a response; None: the folder's stop tokens.
        stop_texts: texts that end a response too.
        expert_choices: shape of the experts that it returns when asked to; None: it is not asked.

    Raises ConfigError or RolloutError if the engine cannot be built: its package is missing, the model is not supported, lengths exceed
    the model's, or a replica would span nodes.
    """
    chosen = engine_class(config.engine)
    size = tensor_parallel_size if chosen.traits.splits_model else 1
    replica = Replica.of_rank(rank, world_size, size)
    _require_inside_a_node(size)
    if expert_choices is not None and not chosen.traits.returns_experts:
        raise ConfigError(f"model.router.replay = 'engine', but the engine {config.engine} returns no experts")
    engine = chosen.build(
        EngineBuild(
            config=config,
            folder=model_path,
            dtype=dtype,
            replica=replica,
            rank=rank,
            seed=seed,
            max_model_len=max_model_len,
            unknown_token_ids=unknown_token_ids,
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            expert_choices=expert_choices,
        )
    )
    if chosen.traits.returns_experts and engine.expert_choices != expert_choices:
        raise ConfigError(
            f"rollout.engine = {config.engine!r}: the trait returns_experts promises the experts of {expert_choices}, but the engine was "
            f"built for {engine.expert_choices}; its build must pass build.expert_choices to StatefulEngine"
        )
    return engine


def _require_inside_a_node(tensor_parallel_size: int) -> None:
    """Raise ConfigError if a replica would span nodes; contiguous ranks do not if the size divides the processes per node."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", tensor_parallel_size))  # set by torchrun
    if processes % tensor_parallel_size:
        raise ConfigError(
            f"rollout.tensor_parallel_size = {tensor_parallel_size} (null: parallel.tensor_model_parallel_size) does not divide the "
            f"{processes} processes of this node, so a replica would span nodes; use a divisor of {processes}"
        )
