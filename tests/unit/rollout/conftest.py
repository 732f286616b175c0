"""A tiny model of each kind and engines on it, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout_models import in_buckets, load_model, named_weights, write_model
from vapo_mcore.rollout.base import Replica
from vapo_mcore.rollout.transformers_engine import TransformersEngine

ONE = Replica.of_rank(0, 1, 1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def make_engine() -> Callable[..., TransformersEngine]:
    def make(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersEngine:
        return TransformersEngine(folder, dtype, ONE, max_model_len=128, device=torch.device("cpu"))

    return make


@pytest.fixture
def ready_engine(make_engine: Callable[..., TransformersEngine]) -> Callable[[Path], tuple[TransformersEngine, Any]]:
    """An engine that holds the folder's weights, and the plain model."""

    def make(folder: Path) -> tuple[TransformersEngine, Any]:
        model, engine = load_model(folder), make_engine(folder)
        weights = named_weights(model)
        engine.wake_weights()
        engine.update_weights(in_buckets(weights), list(weights))
        engine.wake_kv_cache()
        return engine, model

    return make
