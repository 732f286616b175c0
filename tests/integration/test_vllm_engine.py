"""The real vLLM in the processes of a run: tensor parallel, as several replicas, and both; against plain transformers.

The cases are in vllm_worker.py: one launch runs all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.forks import run_ranks, run_script
from tests.rollout_models import write_model
from tests.torchrun import run_torchrun

pytest.importorskip("vllm", reason="vLLM is not installed")

WORKER = Path(__file__).with_name("vllm_worker.py")


def launch(
    folder: Path, nproc: int, tp: int, report: Path, run: Callable[..., subprocess.CompletedProcess[str]] = run_ranks
) -> dict[str, Any]:
    result = run(WORKER, nproc, str(folder), str(tp), str(report), timeout=600)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    written = re.search(r"^CASES: .*?\[$(.*?)^\]$", WORKER.read_text(), re.MULTILINE | re.DOTALL)
    assert written is not None
    assert re.findall(r"^case (\w+) ok", result.stdout, re.MULTILINE) == re.findall(r"\w+", written[1])
    for line in ("leaked", "Traceback", "Error"):
        assert line not in result.stderr, result.stderr[-8000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_model("qwen2_tied", tmp_path_factory.mktemp("tied"))
    return launch(folder, nproc=2, tp=1, report=folder / "report.json")


def test_two_replicas(two_replicas: dict[str, Any]) -> None:
    assert two_replicas["first_generation_cpu_seconds"] < 10  # no C++ compiler at work


def test_tensor_parallel_replica_samples_the_same(two_replicas: dict[str, Any], tmp_path: Path) -> None:
    """Seeds do not know of the layout; only the rounding of the logits may differ."""
    report = launch(write_model("qwen2_tied", tmp_path), nproc=2, tp=2, report=tmp_path / "report.json")
    same = [a == b for a, b in zip(report["responses"], two_replicas["responses"], strict=True)]
    assert sum(same) >= 0.9 * len(same)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "nproc", "tp"), [("qwen2", 4, 2), ("qwen3", 2, 2), ("llama_tied_stored_twice", 1, 1)])
def test_other_models_and_layouts(model: str, nproc: int, tp: int, tmp_path: Path) -> None:
    launch(write_model(model, tmp_path), nproc, tp, tmp_path / "report.json")


@pytest.mark.slow
def test_two_runs_on_one_machine_at_once(tmp_path: Path) -> None:
    """Each has shared memory of its own, although both are the first ranks of a torchrun."""
    folder = write_model("qwen2", tmp_path)
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(launch, folder, 2, 2, tmp_path / f"{number}.json", run_torchrun) for number in range(2)]
        first, second = (run.result() for run in runs)
    assert first["responses"] == second["responses"]


def test_start_errors_are_for_people(tmp_path: Path) -> None:
    """What vLLM cannot start with is one message, not a traceback of its own."""
    folder = write_model("qwen2", tmp_path)
    code = f"""
import torch, torch.distributed as dist
from vapo_mcore.config.schema import RolloutConfig, VllmConfig
from vapo_mcore.errors import RolloutError
from vapo_mcore.rollout.factory import build_rollout_engine

def build(**vllm):
    config = RolloutConfig(engine="vllm", max_response_length=8, vllm=VllmConfig(**vllm))
    layout = dict(tensor_parallel_size=1, rank=0, world_size=1)
    return build_rollout_engine(config, {str(folder)!r}, torch.float32, **layout, max_model_len=64, seed=1)

for vllm, message in (({{}}, "initialise the process group"), ({{"kv_cache_gib": 100000.0}}, "vLLM could not start with model")):
    try:
        build(**vllm)
    except RolloutError as error:
        assert message in str(error), error
        print("refused:", message)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
    (tmp_path / "starts.py").write_text(code)
    result = run_script(tmp_path / "starts.py", timeout=120)
    assert result.returncode == 0, result.stderr[-8000:]
    assert result.stdout.count("refused:") == 2
