"""Which optimizer state a resume takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vapo_mcore.checkpoint.resume import _different_degrees, _require_loadable
from vapo_mcore.checkpoint_files import Manifest
from vapo_mcore.errors import CheckpointError

PARALLEL: Any = SimpleNamespace(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=1,
)


def checkpoint(folder: Path, form: str, layers: str, updates: int = 3) -> Any:
    layout = {"tensor_model_parallel_size": 1}
    manifest = Manifest("rl", 7, form, {"policy": updates}, layout, {}, "0.1.0", layers=layers)
    return SimpleNamespace(manifest=manifest, path=folder / "checkpoints" / "step_000007")


@pytest.mark.parametrize(("saved", "now"), [("te", "local"), ("local", "te"), ("te", "te_grouped")])
def test_shards_of_other_layers_are_refused(saved: str, now: str, tmp_path: Path) -> None:
    """They hold the parameters in another order; Megatron would fill the wrong ones."""
    names = {
        "te": "model.attention = te",
        "local": "model.attention = sdpa or varlen",
        "te_grouped": "model.attention = te, grouped experts",
    }
    with pytest.raises(CheckpointError) as caught:
        _require_loadable(checkpoint(tmp_path, "dp_reshardable", saved), {"policy": PARALLEL}, now)
    message = str(caught.value)
    assert f"cannot be loaded with other layers ({names[saved]} -> {names[now]})" in message
    assert f"or resume with {names[saved]}, with checkpoint.reshardable_every=1" in message


@pytest.mark.parametrize(
    ("form", "saved", "updates"),
    [
        ("dp_reshardable", "local", 3),
        ("dp_reshardable", "", 3),  # written before the layers were recorded
        ("fully_reshardable", "te", 3),
        ("dp_reshardable", "te", 0),  # without optimizer state
    ],
)
def test_what_can_be_loaded(form: str, saved: str, updates: int, tmp_path: Path) -> None:
    _require_loadable(checkpoint(tmp_path, form, saved, updates), {"policy": PARALLEL}, "local")


def test_shards_of_another_layout_are_refused(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(**{**PARALLEL.__dict__, "tensor_model_parallel_size": 2})
    with pytest.raises(
        CheckpointError, match=r"at another layout \(tensor_model_parallel_size 1 -> 2\); .* or resume at the old layout, with"
    ):
        _require_loadable(checkpoint(tmp_path, "dp_reshardable", "local"), {"policy": other}, "local")


def test_degrees_of_both_models_are_compared_with_those_that_each_was_saved_in() -> None:
    tp2: Any = SimpleNamespace(**{**PARALLEL.__dict__, "tensor_model_parallel_size": 2})
    pp2: Any = SimpleNamespace(**{**PARALLEL.__dict__, "pipeline_model_parallel_size": 2})
    one, two = "tensor_model_parallel_size", "pipeline_model_parallel_size"

    def different(critic_layout: dict[str, int] | None, policy: Any, critic: Any, critic_updates: int = 3) -> list[str]:
        updates = {"policy": 3, "critic": critic_updates}
        manifest = Manifest("rl", 7, "dp_reshardable", updates, {one: 2, two: 1}, {}, "0.1.0", critic_layout=critic_layout)
        return _different_degrees(manifest, {"policy": policy, "critic": critic})

    assert different(None, tp2, tp2) == []
    assert different(None, PARALLEL, PARALLEL) == [f"{one} 2 -> 1"]  # of both
    assert different(None, tp2, PARALLEL) == [f"{one} 2 -> 1 of the critic"]
    assert different({one: 1, two: 1}, tp2, tp2) == [f"{one} 1 -> 2 of the critic"]
    assert different({one: 1, two: 2}, tp2, pp2) == []
    assert different({one: 1, two: 2}, tp2, tp2, critic_updates=0) == []  # no optimizer state is saved
