"""A whole run from the command line on the fake device: value pretraining, RL steps with a resume between them, export, its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.forks import run_command
from tests.training_setup import assert_same_means, read_metrics, repeatable_rows, write_setup

SETTINGS = (
    "parallel.world_size=1",
    "model.offload=true",
    "rollout.max_response_length=24",
    "critic.value_pretraining={steps: 1, lr: 0.01, head_only: true}",
    "algorithm.kl={place: loss, kind: k3, coef: 0.1}",
    "checkpoint={every_minutes: 0, every_steps: 1, keep_last: 9}",
    "eval.max_prompts=2",
)
KINDS = ("fake", "plain")
pytestmark = pytest.mark.slow


def run(folder: Path, kind: str, command: str, *arguments: str) -> None:
    given = [str(folder / "base.yaml"), *arguments, f"run.dir={folder / kind}", *SETTINGS]
    result = run_command(command, *given, timeout=400, fake_cuda=kind == "fake")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs "fake" and "plain", each resumed after a step in a new process, and evaluations of their exports."""
    folder = write_setup(tmp_path_factory.mktemp("fake_cuda_cli"), model="qwen2_tied")
    for kind in KINDS:
        run(folder, kind, "train", "run.steps=1")
        run(folder, kind, "train", "--resume", "run.steps=2")
        run(folder, kind, "eval", "--checkpoint", str(folder / kind / "export" / "hf"))
    return folder


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "export" / "hf" / "model.safetensors")


def test_metrics_are_those_of_the_cpu(folder: Path) -> None:
    found, expected = repeatable_rows(folder / "fake"), repeatable_rows(folder / "plain")
    assert [(row["stage"], row["step"]) for row in found] == [("rl", 0), ("value_pretraining", 1), ("rl", 1), ("rl", 2)]
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, list):
                assert_same_means(row[name], value, name)
            elif isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            else:
                assert row[name] == value, name


def test_exports_are_those_of_the_cpu(folder: Path) -> None:
    found, expected = weights(folder / "fake"), weights(folder / "plain")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-5, name


def test_the_peak_of_a_step_is_measured_and_models_take_turns(folder: Path) -> None:
    """More than the larger update's state in float32 (16 bytes an element), less than both models' state at once."""
    parameters = sum(tensor.numel() for tensor in weights(folder / "fake").values())
    pretraining, *steps = (row["memory/device_peak_gib"] * 2**30 for row in read_metrics(folder / "fake")[1:])
    assert len(steps) == 2
    for rl in steps:
        assert 16 * parameters < rl < 2 * 16 * parameters
        assert pretraining < rl / 2  # of the critic only a head is trained
