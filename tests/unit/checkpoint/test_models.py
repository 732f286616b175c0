"""Models and optimizers through a checkpoint in a world of one: bit for bit, from a snapshot, and nothing in it is executed."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.conftest import build, contents, update
from vapo_mcore.checkpoint.models import ModelSaver, OptimizerFormat, check_steps, load_optimizer, load_weights
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.attention import RMSNorm
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.weights.distcp import METADATA_NAME


def save(saver: ModelSaver, model: MegatronModel, target: Path, form: OptimizerFormat, *, meanwhile: int = 0) -> None:
    """Save, with ``meanwhile`` updates between the snapshot and the writing."""
    for part in ("weights", "optimizer"):
        (target / part).mkdir(parents=True)
    saves = [saver.weights(model, target / "weights"), saver.optimizer(model, target / "optimizer", form)]
    update(model, meanwhile, seed=99)
    for part in saves:
        part.write()
        assert all(size > 0 for size, _ in part.finish().values())


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_reshardable"])
@pytest.mark.parametrize(
    ("role", "dtype", "head_only"), [("policy", "float32", False), ("critic", "bfloat16", False), ("critic", "float32", True)]
)
def test_what_was_saved_comes_back_and_training_goes_on_alike(
    tmp_path: Path, folder: Path, parallel: ParallelContext, role: str, dtype: str, head_only: bool, form: OptimizerFormat
) -> None:
    model = build(role, folder, parallel, seed=1, dtype=dtype, head_only=head_only)
    update(model, 3, seed=2)
    before = contents(model)
    save(ModelSaver(), model, tmp_path, form, meanwhile=2)
    other = build(role, folder, parallel, seed=5, dtype=dtype, head_only=head_only)
    load_weights(other, tmp_path / "weights")
    load_optimizer(other, tmp_path / "optimizer", form, 3)
    check_steps(other)
    assert_equal(before, contents(other))
    update(other, 2, seed=99)
    assert_equal(contents(model), contents(other))
    assert model.optimizer is not None and other.optimizer is not None
    assert (other.optimizer.updates, other.optimizer.learning_rate) == (5, model.optimizer.learning_rate)


def test_weights_alone_give_the_optimizer_its_start(tmp_path: Path, folder: Path, parallel: ParallelContext) -> None:
    """Without updates nothing is saved of the optimizer: main parameters follow the loaded weights."""
    model = build("policy", folder, parallel, seed=1, dtype="bfloat16")
    (tmp_path / "weights").mkdir()
    part = ModelSaver().weights(model, tmp_path / "weights")
    part.write()
    part.finish()
    other = build("policy", folder, parallel, seed=5, dtype="bfloat16")
    load_weights(other, tmp_path / "weights")
    assert_equal(contents(model), contents(other))


def test_norms_with_an_extra_state_read_weights_without(
    tmp_path: Path, folder: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformer Engine's norms have one (empty without fp8): weights saved by other layers, or converted, are read all the same."""
    model = build("policy", folder, parallel, seed=1)
    (tmp_path / "weights").mkdir()
    part = ModelSaver().weights(model, tmp_path / "weights")
    part.write()
    part.finish()
    monkeypatch.setattr(RMSNorm, "get_extra_state", lambda norm: torch.empty(0, dtype=torch.uint8), raising=False)
    monkeypatch.setattr(RMSNorm, "set_extra_state", lambda norm, state: None, raising=False)
    other = build("policy", folder, parallel, seed=5)
    assert any(name.endswith("layernorm._extra_state") for name in other.chunks[0].state_dict())
    load_weights(other, tmp_path / "weights")
    assert_equal(contents(model), contents(other))


def test_warm_up_goes_on_half_done(folder: Path, parallel: ParallelContext) -> None:
    model = build("policy", folder, parallel, seed=1)
    assert model.optimizer is not None
    model.optimizer.set_updates(2)
    assert (model.optimizer.updates, model.optimizer.learning_rate) == (2, 0.005)
    update(model, 1, seed=1)
    assert (model.optimizer.updates, model.optimizer.learning_rate) == (3, 0.0075)
    assert {group["lr"] for o in model.optimizer.megatron.chained_optimizers for group in o.optimizer.param_groups} == {0.0075}


def test_buffers_are_used_again(tmp_path: Path, folder: Path, parallel: ParallelContext) -> None:
    model, saver = build("policy", folder, parallel, seed=1), ModelSaver()
    update(model, 1, seed=1)
    held = []
    for number in range(3):
        save(saver, model, tmp_path / str(number), "dp_reshardable")
        held.append(saver.pool.num_bytes)
    assert held[0] == held[1] == held[2] > 0
    saver.forget("policy")
    assert saver.pool.num_bytes == 0


def test_what_does_not_fit_is_named(tmp_path: Path, folder: Path, parallel: ParallelContext) -> None:
    model = build("critic", folder, parallel, seed=1)
    update(model, 1, seed=1)
    save(ModelSaver(), model, tmp_path, "dp_reshardable")
    with pytest.raises(CheckpointError, match=r"surplus: output_layer\.bias"):
        load_weights(build("policy", folder, parallel, seed=1), tmp_path / "weights")
    with pytest.raises(CheckpointError, match="does not match the model"):
        load_optimizer(build("critic", folder, parallel, seed=1), tmp_path / "optimizer", "fully_reshardable", 1)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("where", [METADATA_NAME, "common.pt", "chunk"])
def test_code_in_a_checkpoint_does_not_run(
    tmp_path: Path, folder: Path, parallel: ParallelContext, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("policy", folder, parallel, seed=1)
    update(model, 1, seed=1)
    save(ModelSaver(), model, tmp_path, "dp_reshardable")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    weights = tmp_path / "weights"
    if where == METADATA_NAME:
        (weights / where).write_bytes(pickle.dumps(Bomb()))
    elif where == "common.pt":
        torch.save(Bomb(), weights / where)
    else:
        file = next(weights.glob("*.distcp"))
        stream = io.BytesIO()
        torch.save([Bomb()], stream)
        file.write_bytes(stream.getvalue().ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError):
        load_weights(model, weights)
    assert not (tmp_path / "ran").exists()
