"""The tiny model's script end to end with a few steps: a folder that other tools load, and nothing where it fails."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT, run_bounded

SCRIPT = ROOT / "tools" / "make_tiny_model.py"
sys.path.insert(0, str(SCRIPT.parent))
from make_tiny_model import OWN_FILES  # noqa: E402


def make(output: Path, *options: str) -> None:
    """Make a model in 60 steps, which learn."""
    result = run_bounded([sys.executable, str(SCRIPT), "--output", str(output), "--steps", "60", *options], timeout=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    loss = float(re.search(r"supervised step 60/60: loss ([\d.]+)", result.stdout).group(1))  # type: ignore[union-attr]
    assert loss < 1.2  # a uniform guess over the characters is 3.5
    assert "400 held-out problems right" in result.stdout


def test_a_few_steps(tmp_path: Path) -> None:
    output = tmp_path / "tiny"
    make(output, "--processes", "2")
    rows = {name: [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "heldout")}
    assert len(rows["train"]) == 6000 and len(rows["heldout"]) == 400
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["heldout"]}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(output)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 2_000_000
    assert AutoTokenizer.from_pretrained(output).decode([1]) == "<eos>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]
    assert not (output / "untrained").exists() and not (output / "trained").exists()
    assert {path.name for path in output.iterdir()} <= OWN_FILES  # so that a newer version of the script replaces it


@pytest.mark.slow
def test_a_mixture(tmp_path: Path) -> None:
    make(tmp_path / "tiny_mixture", "--experts", "8")
    config = json.loads((tmp_path / "tiny_mixture" / "config.json").read_text())
    assert (config["model_type"], config["num_experts"], config["num_experts_per_tok"]) == ("qwen3_moe", 8, 2)


def test_a_failed_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing0")  # the workers cannot connect
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "tiny"), "--steps", "1"]
    result = run_bounded(command, timeout=180)
    assert result.returncode != 0
    assert "missing0" in result.stderr
    assert list(tmp_path.iterdir()) == []
