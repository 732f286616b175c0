"""Runs on this machine through nemo-run: their output, their exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.torchrun import run_bounded
from tests.training_setup import read_metrics, write_setup


@pytest.mark.slow
def test_a_run_and_one_that_fails(tmp_path: Path) -> None:
    recipe = write_setup(tmp_path) / "base.yaml"
    command = [sys.executable, "-m", "vapo_mcore.cli", "launch", str(recipe), "--executor", "local", "--set", f"logs={tmp_path}/logs"]
    settings = ["run.steps=1", "critic.value_pretraining.steps=1", "eval.at_start=false", "eval.at_end=false"]
    result = run_bounded([*command, *settings], timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 1/1 |" in result.stdout
    assert [row["step"] for row in read_metrics(tmp_path / "run") if row["stage"] == "rl"] == [1]
    bad = "data.train.0.verifier=no_such_module:score"
    result = run_bounded([*command, *settings, f"run.dir={tmp_path}/bad", bad], timeout=400)
    assert result.returncode == 1
    assert "error: job train ended as FAILED; logs in" in result.stderr
    assert "no_such_module" in result.stdout
