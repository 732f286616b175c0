"""``benchmarks/gpu_step.py`` runs to its end on the fake device, has every number, and a part that fails hides no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forks import ROOT, inherited
from vapo_mcore.certify.tolerances import BY_NAME

SLOW_PARTS = "machine,engine"


def run(folder: Path, program: list[str], *options: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.fake_cuda", *program, "--small", "--output", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, env=inherited(), capture_output=True, text=True, timeout=400, check=False)
    assert (folder / "gpu_step.json").is_file(), done.stdout[-3000:] + done.stderr[-6000:]
    return done.returncode, json.loads((folder / "gpu_step.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    return run(tmp_path_factory.mktemp("gpu_step"), ["benchmarks/gpu_step.py"], "--skip", SLOW_PARTS)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    skipped = f"{SLOW_PARTS},offload,rates,sleep,memory"
    return run(tmp_path_factory.mktemp("planted"), ["tests/fake_cuda/planted.py", "swapped_rows,crash"], "--skip", skipped)


def test_every_part_that_is_not_skipped_holds(whole: tuple[int, dict[str, Any], str]) -> None:
    code, result, shown = whole
    verdicts = {name: part["verdict"] for name, part in result["parts"].items()}
    assert verdicts == {
        "logprobs": "holds",
        "values": "holds",
        "offload": "holds",
        "rates": "information",
        "sleep": "holds",
        "memory": "holds",
        "logprob_memory": "information",
        "machine": "skipped",
        "engine": "skipped",
    }
    assert code == 0
    assert result["device"] == "Fake CUDA device"
    assert all(f"\n{name}: " in shown for name, verdict in verdicts.items() if verdict != "skipped")


def test_every_number_is_there(whole: tuple[int, dict[str, Any], str]) -> None:
    numbers = whole[1]["numbers"]
    positive = [
        *(f"rates: {what}" for what in ("log-probs", "training, forward and backward", "generation", "weight sync", "offloading")),
        *(f"rates: model FLOPs utilisation, {what}" for what in ("log-probs", "training, forward and backward")),
        *(f"rates: offloading, {way}" for way in ("to the device", "to the host")),
        *(f"sleep: {what}" for what in ("sleep", "wake up for weights", "wake up for the KV cache")),
        *(f"memory: peak of {stage}" for stage in ("values", "critic_update", "logprobs", "policy_update", "generate, of the engine")),
        "logprob_memory: log-probs and entropies, forward and backward",
    ]
    assert {name for name in positive if not numbers.get(name, 0) > 0} == set()


def test_parity_with_transformers_in_float32(whole: tuple[int, dict[str, Any], str]) -> None:
    numbers = whole[1]["numbers"]
    assert numbers["logprobs: mean |dlogp|, float32"] <= 1e-6
    assert numbers["logprobs: max |dlogp|, float32"] <= 1e-4
    assert numbers["logprobs: hidden states by layer, float32"] <= BY_NAME["trainer/layer"].limit("float32")
    assert numbers["values: values against transformers"] <= 1e-5


def test_a_planted_error_fails_parity_and_a_crash_hides_nothing(planted: tuple[int, dict[str, Any], str]) -> None:
    code, result, shown = planted
    parts = result["parts"]
    assert code == 2
    assert parts["logprobs"]["verdict"] == "fails"
    wrong = {entry["what"]: entry for entry in parts["logprobs"]["measurements"] if entry["verdict"] == "fails"}
    assert "after layer 1, the first that differs" in wrong["hidden states by layer, float32"]["measured"]
    assert wrong["mean |dlogp|, float32"]["value"] > 1e-3
    assert parts["values"]["verdict"] == "fails"
    assert parts["values"]["message"] == "killed by SIGABRT: RuntimeError: an illegal memory access was encountered"
    assert parts["logprob_memory"]["verdict"] == "information"  # of the process after the one that was killed
    assert "killed by SIGABRT" in shown


def test_options_that_cannot_be(tmp_path: Path) -> None:
    def said(*options: str) -> str:
        command = [sys.executable, "benchmarks/gpu_step.py", *options, "--output", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=inherited(), capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "--skip parity: unknown; there are machine, logprobs" in said("--small", "--skip", "parity")
    assert f"--model {tmp_path}: has no config.json" in said("--small", "--model", str(tmp_path))
    assert "no CUDA device; --small runs" in said()
