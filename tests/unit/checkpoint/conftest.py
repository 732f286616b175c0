"""A policy and a critic of two tiny layers in a world of one, with an optimizer that has made updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.config_helpers import write_model
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import OptimizerConfig
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel

LAYOUT = {
    "world_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": None,
    "equal_microbatches": False,
    "timeout_minutes": 5,
}


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelContext]:
    context = initialize_parallel(SimpleNamespace(**LAYOUT))  # type: ignore[arg-type]
    yield context
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("models") / "model",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def build(
    role: str, folder: Path, parallel: ParallelContext, *, seed: int, dtype: str = "float32", head_only: bool = False
) -> MegatronModel:
    """With random weights, the same for the same seed."""

    def fill(chunks: list[Any]) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))

    settings: Any = SimpleNamespace(dtype=dtype, attention="auto", recompute="none")
    return MegatronModel(
        role,  # type: ignore[arg-type]
        read_architecture(folder),
        settings,
        parallel,
        load_weights=fill,
        optimizer=OptimizerConfig(lr=0.01),
        warmup_updates=4,
        head_only=head_only,
    )


def update(model: MegatronModel, times: int, *, seed: int, unscheduled_lr: float | None = None) -> None:
    """Optimizer steps from random gradients; with ``unscheduled_lr`` beside the schedule."""
    assert model.optimizer is not None
    generator = torch.Generator().manual_seed(seed)
    for _ in range(times):
        for chunk in model.wrapped:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            chunk.start_grad_sync()
            chunk.finish_grad_sync()
        model.optimizer.step(unscheduled_lr=unscheduled_lr)


def contents(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Every parameter, main parameter, moment and step counter, copied."""
    assert model.optimizer is not None
    found = {f"{n}.{name}": p.detach().clone() for n, chunk in enumerate(model.chunks) for name, p in chunk.named_parameters()}
    for number, optimizer in enumerate(model.optimizer.megatron.chained_optimizers):
        for index, parameter in enumerate(p for group in optimizer.optimizer.param_groups for p in group["params"]):
            found[f"main.{number}.{index}"] = parameter.detach().clone()
            for key, value in optimizer.optimizer.state.get(parameter, {}).items():
                found[f"{key}.{number}.{index}"] = value.clone()
    return found
