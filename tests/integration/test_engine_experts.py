"""vLLM's choices of experts: recorded as transformers makes them, and repeated by the trainer in four layouts of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import run_ranks
from tests.rollout_models import write_model

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_model("qwen3_moe", tmp_path_factory.mktemp("mixture"))
    result = run_ranks(Path(__file__).with_name("experts_worker.py"), 2, str(folder), str(folder / "report.json"), timeout=600)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    print(json.dumps(found, indent=1))
    return found


def test_vllm_records_what_transformers_chooses(report: dict[str, Any]) -> None:
    """In float32, all of them; prefixes come from the cache, and some requests are preempted and prefilled again."""
    assert report["prefix_caching"]
    assert report["preempted"] > 0
    assert report["pairs"] > 4000
    assert report["other"] <= 1e-3 * report["pairs"]  # a near tie may round otherwise
    assert report["recorder_holds"] == 0  # of finished requests nothing is kept


def test_an_engine_that_returns_too_little_names_the_counts(report: dict[str, Any]) -> None:
    for name, found in (("no_experts", "are missing"), ("few_layers", "1 layers x 2 experts"), ("few_tokens", " tokens x 2 layers")):
        assert found in report[name] and " tokens x 2 layers x 2 experts" in report[name], report[name]
    assert "did not record every layer" in report["zeros"]


@pytest.mark.parametrize("layout", ["ep2", "tp2_ep2", "pp2", "cp2_ep2"])
def test_the_trainer_repeats_the_engine(report: dict[str, Any], layout: str) -> None:
    """Log-probs of both within 1e-5 although the trainer's routers would choose otherwise; without replay some are 0.1 apart."""
    found = report[layout]
    assert found["changed_frac"] > 0.2
    assert found["without_mean"] > 0.01
    assert found["without_max"] > 0.1
    assert found["with_max"] <= 1e-5
    assert found["unlike_the_engine"] == found["last_without_choice"] == 0.0
    assert found["routing_of_the_next_pass"] == 0.0
    assert found["logprobs_of_the_next_pass"] == 0.0
