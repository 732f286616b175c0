"""Build the configured rollout engine, without falling back to another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vapo_mcore.config.schema import RolloutConfig
from vapo_mcore.errors import ConfigError
from vapo_mcore.rollout.base import Replica, RolloutEngine
from vapo_mcore.rollout.stopping import StopTexts


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
) -> RolloutEngine:
    """Build this rank's engine, asleep. All ranks must call this together, after initialising the process group.

    Args:
        tensor_parallel_size: number of contiguous ranks of a vLLM replica. A transformers replica is always one rank.
        max_model_len: maximum tokens of prompt and response together.
        seed: must be equal on all ranks.
        unknown_token_ids: vocabulary ids that the tokenizer does not define; they are never sampled.
        stop_ids: ids that end a response; None: the folder's stop tokens.
        stop_texts: texts that end a response too.

    Raises ConfigError or RolloutError if the engine cannot be built: vLLM is missing, the model is not supported, lengths exceed the
    model's, or a replica would span nodes.
    """
    common: dict[str, Any] = {
        "max_model_len": max_model_len,
        "unknown_token_ids": unknown_token_ids,
        "stop_ids": stop_ids,
        "stop_texts": stop_texts,
    }
    if config.engine == "vllm":
        from vapo_mcore.rollout.vllm_engine import VllmEngine

        replica = Replica.of_rank(rank, world_size, tensor_parallel_size)
        _require_inside_a_node(tensor_parallel_size)
        return VllmEngine(model_path, dtype, config.vllm, replica, rank=rank, seed=seed, **common)
    from vapo_mcore.rollout.transformers_engine import TransformersEngine

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return TransformersEngine(model_path, dtype, Replica.of_rank(rank, world_size, 1), device=device, **common)


def _require_inside_a_node(tensor_parallel_size: int) -> None:
    """Raise ConfigError if a replica would span nodes; contiguous ranks do not if the size divides the processes per node."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", tensor_parallel_size))  # set by torchrun
    if processes % tensor_parallel_size:
        raise ConfigError(
            f"rollout.tensor_parallel_size = {tensor_parallel_size} (null: parallel.tensor_model_parallel_size) does not divide the "
            f"{processes} processes of this node, so a vLLM replica would span nodes; use a divisor of {processes}"
        )
