"""What a command of the pages has left: looked at by ``look(tree, output)``, where patterns of paths and output say too little."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torchrun import ROOT
from tests.training_setup import read_metrics


def _rows(run: Path, stage: str = "rl") -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["stage"] == stage and row["step"] > 0]  # 0: the evaluation before the first


def _accuracies(run: Path) -> list[float]:
    """Of each evaluation of a run, in order."""
    return [row[name] for row in read_metrics(run) for name in row if name.startswith("eval/") and name.endswith("/avg@1")]


def quickstart_learned(tree: Path, output: str) -> None:
    run = tree / "runs" / "quickstart"
    assert [row["step"] for row in _rows(run)] == list(range(1, 61))
    assert len(_rows(run, "value_pretraining")) == 8
    accuracies = _accuracies(run)
    assert accuracies[-1] > accuracies[0] + 0.3, accuracies


def the_critic_sees(tree: Path, output: str) -> None:
    """docs/critic.md: explained variance on held-out prompts after value pretraining, and later."""
    run, name = tree / "runs" / "critic_game_vapo", "critic/probe_explained_variance"
    before, *_, after = (row[name] for row in _rows(run, "value_pretraining"))
    later = [row[name] for row in _rows(run) if name in row]
    assert before < after and after >= 0.4 and max(later) >= 0.5, (before, after, later)


def tutorial_reward_was_given(tree: Path, output: str) -> None:
    """docs/tutorial.md: the scores are those of examples/tutorial/reward.py."""
    files = sorted((tree / "runs" / "tutorial" / "samples").glob("step_*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert samples and {sample["score"] for sample in samples} <= {0.0, 0.2, 1.0}


def report_of_the_quickstart(tree: Path, output: str) -> None:
    page = (tree / "runs" / "quickstart" / "report.html").read_text(encoding="utf-8")
    assert "explained_variance" in page and "quickstart" in page
    assert 'src="http' not in page and 'href="http' not in page  # it loads nothing


def report_of_two_runs(tree: Path, output: str) -> None:
    page = (tree / "both.html").read_text(encoding="utf-8")
    assert "quickstart" in page and "extensions" in page
    assert "nearly_right" in page  # a setting in which they differ


def evaluation_equals_the_runs(tree: Path, output: str) -> None:
    """docs/evaluation.md: an evaluation of the exported folder with the same configuration gives the same numbers."""
    (file,) = (tree / "runs" / "quickstart_eval").glob("*/results.json")
    last = max((tree / "runs" / "quickstart" / "evaluations").glob("step_*.json"))
    found, expected = (json.loads(path.read_text(encoding="utf-8")) for path in (file, last))
    assert found["sets"] == expected["sets"] and expected["sets"]["heldout"]["problems"] == 400


def extension_took_part(tree: Path, output: str) -> None:
    rows = _rows(tree / "runs" / "extensions")
    assert len(rows) == 2
    assert all(math.isfinite(row["policy/term/distance"]) for row in rows), sorted(rows[0])


def replay_is_equal(tree: Path, output: str) -> None:
    """docs/watching.md: from the checkpoint right before the step, at the same layout on CPU, all metrics are equal, bit for bit."""
    assert "step_000011" in output and "~" not in output, output


def replay_of_one_process(tree: Path, output: str) -> None:
    comparison = json.loads((tree / "replay.json").read_text(encoding="utf-8"))
    assert comparison


def resumed(tree: Path, output: str) -> None:
    assert [row["step"] for row in _rows(tree / "runs" / "saved")] == list(range(1, 12))


def smollm2(tree: Path, output: str) -> None:
    model = tree / "models" / "smollm2-135m"
    assert json.loads((model / "source.json").read_text(encoding="utf-8"))["check_nats_per_token"] < 2.1
    assert (model / "model.safetensors").stat().st_size > 250e6


def is_page(name: str) -> Callable[[Path, str], None]:
    def look(tree: Path, output: str) -> None:
        assert output == (ROOT / "docs" / name).read_text(encoding="utf-8")

    return look


def table_is_in_page(name: str) -> Callable[[Path, str], None]:
    def look(tree: Path, output: str) -> None:
        assert output.strip() and output.strip() in (ROOT / "docs" / name).read_text(encoding="utf-8")

    return look


def gpu_step_measured(tree: Path, output: str) -> None:
    """docs/gpu_status.md: its parts and numbers; without a GPU nothing is said of memory."""
    result = json.loads((tree / "runs" / "gpu_step" / "gpu_step.json").read_text(encoding="utf-8"))
    verdicts = {name: part["verdict"] for name, part in result["parts"].items()}
    assert verdicts.pop("memory") == verdicts.pop("logprob_memory") == "not applicable"
    assert set(verdicts.values()) == {"holds", "information", "skipped"}, verdicts
    assert result["numbers"]["logprobs: mean |dlogp|, float32"] < 1e-5
    assert result["numbers"]["rates: generation"] > 0


def json_lines(tree: Path, output: str) -> None:
    """make bench and the programs in benchmarks/ print a JSON object a line."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines
    assert all(json.loads(line)["benchmark"] for line in lines)
