"""Model folders, the factory's explicit choice, and what importing the package costs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout_models import load_model, named_weights
from vapo_mcore.config.architecture import ExpertChoices
from vapo_mcore.config.engines import BUILT_IN_ENGINES
from vapo_mcore.config.schema import RolloutConfig
from vapo_mcore.errors import CheckpointError, ConfigError
from vapo_mcore.rollout.base import EngineState
from vapo_mcore.rollout.factory import build_rollout_engine, engine_class, engine_traits
from vapo_mcore.rollout.hf_folder import parameter_shapes, require_supported, stop_token_ids
from vapo_mcore.rollout.transformers_engine import TransformersEngine

GetFolder = Callable[[str], Path]


def edited(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text())
    content = {key: value for key, value in (content | changes).items() if value is not None}
    (target / file).write_text(json.dumps(content))
    return target


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied", "qwen3_moe"])
def test_parameter_shapes_are_the_files(name: str, folder: GetFolder) -> None:
    weights = named_weights(load_model(folder(name)))
    assert parameter_shapes(folder(name)) == {key: tuple(tensor.shape) for key, tensor in weights.items()}
    assert ("lm_head.weight" in weights) == (name != "qwen2_tied")


def test_stop_ids(folder: GetFolder, tmp_path: Path) -> None:
    plain = folder("qwen2")
    assert stop_token_ids(plain) == (1,)
    several = edited(plain, tmp_path / "a", "generation_config.json", eos_token_id=[9, 4, 9])
    assert stop_token_ids(several) == (4, 9)
    only_config = edited(plain, tmp_path / "b", "generation_config.json", eos_token_id=None)
    assert stop_token_ids(only_config) == (1,)
    (only_config / "generation_config.json").unlink()
    assert stop_token_ids(only_config) == (1,)
    without = edited(only_config, tmp_path / "c", "config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match="no eos_token_id"):
        stop_token_ids(without)
    (without / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        stop_token_ids(without)


def test_stop_ids_of_the_folder_end_a_response(folder: GetFolder, tmp_path: Path) -> None:
    path = edited(folder("qwen2"), tmp_path / "a", "generation_config.json", eos_token_id=[9, 4])
    engine = TransformersEngine(path, torch.float32, _replica(), max_model_len=64, device=torch.device("cpu"))
    assert engine.stop_ids.tolist() == [4, 9]


def _replica() -> Any:
    from vapo_mcore.rollout.base import Replica

    return Replica.of_rank(0, 1, 1)


def test_models_that_cannot_be_served(folder: GetFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="= 257 exceeds max_position_embeddings = 256"):
        require_supported(folder("qwen2"), 257)


def test_factory_builds_what_is_named(folder: GetFolder) -> None:
    config = RolloutConfig(engine="transformers", max_response_length=8)
    engine = build_rollout_engine(
        config, folder("qwen2"), torch.float32, tensor_parallel_size=2, max_model_len=64, rank=3, world_size=4, seed=1
    )
    assert isinstance(engine, TransformersEngine)
    assert (engine.replica_index, engine.num_replicas, engine.is_replica_leader, engine.state) == (3, 4, True, EngineState.ASLEEP)


def test_missing_vllm_is_said_and_not_replaced(folder: GetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    config = RolloutConfig(engine="vllm", max_response_length=8)
    with pytest.raises(ConfigError, match=r"vLLM is not installed .* or set rollout.engine: transformers"):
        build_rollout_engine(config, folder("qwen2"), torch.float32, tensor_parallel_size=1, max_model_len=64, rank=0, world_size=1, seed=1)


def test_a_replica_that_would_span_nodes_is_refused(folder: GetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    config = RolloutConfig(engine="vllm", max_response_length=8)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 4 .* does not divide the 6 processes of this node"):
        build_rollout_engine(
            config, folder("qwen2"), torch.float32, tensor_parallel_size=4, max_model_len=64, rank=0, world_size=12, seed=1
        )


def test_an_engine_must_take_the_shape_of_experts(folder: GetFolder, tmp_path: Path) -> None:
    """An engine that promises experts and does not pass the build's shape on would return none."""
    source = (
        "from dataclasses import replace\nfrom vapo_mcore.config.engines import EngineTraits\n"
        "from tests.integration.uniform_engine import UniformEngine\n\n\n"
    )
    takes = "class Takes(UniformEngine):\n    traits = EngineTraits(returns_experts=True)\n\n\n"
    ignores = (
        "class Ignores(Takes):\n    @classmethod\n    def build(cls, build):\n"
        "        return super().build(replace(build, expert_choices=None))\n"
    )
    (tmp_path / "engines.py").write_text(source + takes + ignores)

    def build(name: str, shape: ExpertChoices | None) -> Any:
        config = RolloutConfig(engine=f"{tmp_path}/engines.py:{name}", max_response_length=8)
        sizes: dict[str, Any] = {"tensor_parallel_size": 1, "max_model_len": 64, "rank": 0, "world_size": 1}
        return build_rollout_engine(config, folder("qwen2"), torch.float32, **sizes, seed=1, expert_choices=shape)

    with pytest.raises(ConfigError, match=r"returns_experts promises .*its build must pass build\.expert_choices"):
        build("Ignores", ExpertChoices(3, 2, 8))
    assert build("Takes", ExpertChoices(3, 2, 8)).expert_choices == ExpertChoices(3, 2, 8)
    assert build("Ignores", None).expert_choices is None


def test_importing_the_package_imports_no_engine() -> None:
    code = (
        "import sys, vapo_mcore.rollout, vapo_mcore.rollout.base, vapo_mcore.rollout.seeds, vapo_mcore.rollout.factory;"
        "assert not {'vllm', 'transformers'} & set(sys.modules);"
        "from vapo_mcore.rollout import vllm_engine; assert not {'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"json:dumps is not a class derived from vapo_mcore\.rollout\.stateful\.StatefulEngine"):
        engine_class("json:dumps")
    with pytest.raises(ConfigError, match=r"StatefulEngine does not implement _distributions, _generate, _holds, _load_weights, _sleep$"):
        engine_class("vapo_mcore.rollout.stateful:StatefulEngine")
    with pytest.raises(ConfigError, match="no_such_module cannot be imported"):
        engine_class("no_such_module:Engine")


@pytest.mark.parametrize("name", BUILT_IN_ENGINES)
def test_traits_in_the_table_are_those_of_the_class(name: str) -> None:
    assert engine_class(name).traits == engine_traits(name)
