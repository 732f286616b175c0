"""Parallel contexts and models of workers that take the layouts' model "qwen2" through updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import OptimizerConfig
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.weights.loader import load_hf_into


def context(**degrees: Any) -> ParallelContext:
    """The world of all processes with these degrees ("tensor_model_parallel_size=2"), 1 where none is given."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
    layout: dict[str, Any] = dict.fromkeys(names, 1)
    layout |= dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"))
    return initialize_parallel(
        SimpleNamespace(world_size=dist.get_world_size(), equal_microbatches=False, timeout_minutes=5, **layout | degrees)
    )  # type: ignore[arg-type]


def build(
    role: str,
    folder: Path,
    dtype: str,
    parallel: ParallelContext,
    optimizer: OptimizerConfig,
    *,
    change: Callable[[list[Any]], None] = lambda _: None,
    **options: Any,
) -> MegatronModel:
    """A model of a Hugging Face folder, a critic with a small head; ``change`` gets the loaded chunks before the optimizer is made."""
    architecture = read_architecture(folder)

    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, folder, architecture, parallel, role=role, head_init="small" if role == "critic" else None)  # type: ignore[arg-type]
        change(chunks)

    model: Any = SimpleNamespace(dtype=dtype, attention="auto", recompute="none")
    return MegatronModel(role, architecture, model, parallel, load_weights=load, optimizer=optimizer, **options)  # type: ignore[arg-type]
