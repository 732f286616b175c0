"""Runs in two processes that stop and continue: at the same layout bit for bit, at others within rounding, and past faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.torchrun import run_torchrun
from tests.training_setup import exported_weights, read_metrics, repeatable_rows, write_setup

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
OF_THE_CURVE = ("policy/loss", "critic/loss", "policy/entropy", "critic/grad_norm", "policy/grad_norm", "reward/mean", "policy/lr")
CASES = ("other_layouts", "same_layout", "abandoned", "full_disk", "damage", "refused", "from_a_checkpoint", "critic_layouts")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with all runs, and what they printed."""
    folder = write_setup(tmp_path_factory.mktemp("resume"), model="qwen2")
    result = run_torchrun(HERE / "checkpoint" / "resume_worker.py", 2, str(folder), timeout=600)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    assert [line for line in result.stdout.splitlines() if line.startswith("case ")] == [f"case {name} ok" for name in CASES]
    return folder, result.stdout


@pytest.mark.parametrize(
    ("name", "reshaped", "steps", "tolerance"), [("tp2", "reshaped", 6, 1e-5), ("critic_shared", "critic_reshaped", 4, 1e-4)]
)
def test_a_run_in_changing_layouts_follows_the_curve_of_one(
    runs: tuple[Path, str], name: str, reshaped: str, steps: int, tolerance: float
) -> None:
    """Policy and critic at TP 2, then PP 2, then DP 2; a critic in layouts that are not the policy's, from the first step on."""
    folder, _ = runs
    one, other = repeatable_rows(folder / name), repeatable_rows(folder / reshaped)
    assert [(row["stage"], row["step"]) for row in one] == [(row["stage"], row["step"]) for row in other]
    assert len(one) == 2 + steps
    compared = 0
    for row, again in zip(one, other, strict=True):
        for key in (*OF_THE_CURVE, "critic/probe_explained_variance"):
            if row.get(key) is not None:
                assert again[key] == pytest.approx(row[key], abs=tolerance, rel=tolerance), (row["step"], key)
                compared += 1
    assert compared >= steps * len(OF_THE_CURVE)
    first, second = (load_file(next((folder / run / "export/hf").glob("*.safetensors"))) for run in (name, reshaped))
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < tolerance


@pytest.mark.parametrize(
    ("whole", "name"),
    [("whole", "stopped"), ("whole", "pretraining"), ("unbroken", "abandoned"), ("critic_whole", "critic_resumed")],
)
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(runs: tuple[Path, str], whole: str, name: str) -> None:
    folder, _ = runs
    expected = repeatable_rows(folder / whole)
    if whole == "whole":
        expected = [row for row in expected if row["stage"] != "rl" or row["step"] <= 4]  # test case "refused" has added a step
    else:
        assert exported_weights(folder / name) == exported_weights(folder / whole)
    assert repeatable_rows(folder / name) == expected


def test_what_a_person_is_told(runs: tuple[Path, str]) -> None:
    _, printed = runs
    for text in (
        "SIGUSR1; stopped after step 3 (rl); exit code 75, continue with --resume",
        "warning: checkpoint value_pretraining_000002 failed: cannot write",
        "warning: checkpoint step_000004 failed: cannot write",
        "No space left on device; retrying after the next step",
        "step_000005 is damaged and is not used: policy/optimizer/",
        "has changed since it was written",
        "nothing to resume:",
        "configuration changed: parallel.pipeline_model_parallel_size: 1 -> 2",
        "configuration changed: critic.parallel.tensor_model_parallel_size: 2 -> 1",
        "(allowed by --allow-config-change)",
        "training prompts: restarted (--restart-data)",
        "checkpoint step_000003 is newer than the one the run resumes from; renamed to step_000003.set_aside",
        "critic: trunk from",
    ):
        assert text in printed, text


def test_a_run_starts_from_another_run_s_checkpoint(runs: tuple[Path, str]) -> None:
    """Its policy answers as the exported one did, and its critic explains what the old one had learned to."""
    folder, printed = runs
    assert f"policy: weights from {folder / 'tp2'}/checkpoints/step_000006" in printed
    assert "value head: from the checkpoint" in printed
    assert [row["step"] for row in read_metrics(folder / "started")] == [0, 1]
