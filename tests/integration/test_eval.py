"""``vapo-mcore eval``: nothing dropped or mixed up, bit for bit after a kill, from every kind of checkpoint, as in training."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.forks import run_command, run_ranks
from tests.integration.grading import divisible_by_three
from tests.torchrun import ROOT, run_bounded
from tests.training_setup import read_metrics, read_samples, write_setup
from vapo_mcore.cli import main
from vapo_mcore.evaluation.statistics import pass_at_k
from vapo_mcore.launch.watchdog import read_heartbeats

CLI = [sys.executable, "-m", "vapo_mcore.cli", "eval"]
WORKER = Path(__file__).with_name("eval_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_setup(tmp_path_factory.mktemp("eval"))
    # Seven problems, which no layout divides; two have the same text, and other answers.
    texts = ["1+1=", "2+2=", "3+3=", "1+1=", "5+5=", "6+6=", "7+7="]
    rows = [{"prompt": text, "answer": str(number), "level": "odd" if number % 2 else "even"} for number, text in enumerate(texts)]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = run_ranks(WORKER, 2, str(folder), timeout=600)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    assert result.stdout.count(" ok\n") == 5
    return folder


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text(encoding="utf-8").splitlines()]


def read_results(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    del results["timing"]
    return results


def test_every_problem_has_its_samples_in_order_and_apart_by_id(folder: Path) -> None:
    records = read_records(folder / "whole")
    assert [(row["prompt_id"], row["sample_index"]) for row in records] == [(f"heldout/{n}", k) for n in range(1, 8) for k in range(3)]
    assert [row["ground_truth"] for row in records[::3]] == [str(number) for number in range(7)]
    one, other = records[0:3], records[9:12]
    assert {row["prompt"] for row in one + other} == {"1+1="}
    assert [row["response"] for row in one] != [row["response"] for row in other]  # other seeds
    for row in records:
        assert row["correct"] == bool(divisible_by_three(row["response"], "", {}))


def test_results_are_those_of_the_records(folder: Path) -> None:
    records, results = read_records(folder / "whole"), read_results(folder / "whole")["sets"]["heldout"]
    rights = [sum(row["correct"] for row in records[start : start + 3]) for start in range(0, 21, 3)]
    scores = results["scores"]
    assert scores["avg@3"]["value"] == pytest.approx(fmean(right / 3 for right in rights))
    assert scores["pass@2"]["value"] == pytest.approx(fmean(pass_at_k(3, right, 2) for right in rights))
    assert scores["pass@3"]["value"] == pytest.approx(fmean(right > 0 for right in rights))
    assert scores["maj@3"] is None  # a user's verifier: what the answer is, is not known
    assert scores["avg@3"]["low"] <= scores["avg@3"]["value"] <= scores["avg@3"]["high"]
    assert results["response_tokens"] == sum(row["response_length"] for row in records)
    timing = json.loads((folder / "whole" / "results.json").read_text(encoding="utf-8"))["timing"]
    assert timing["gpu_hours"] == pytest.approx(2 * timing["seconds"] / 3600) and timing["seconds"] > 0  # of two processes
    assert results["truncated"] == fmean(row["finish_reason"] == "length" for row in records)
    odd = results["parts"]["level"]["odd"]
    assert (odd["problems"], odd["scores"]["avg@3"]["value"]) == (3, pytest.approx(fmean(rights[n] / 3 for n in (1, 3, 5))))
    text = (folder / "whole" / "results.md").read_text(encoding="utf-8")
    assert f"{scores['avg@3']['value']:.3f}" in text
    assert "## heldout by level" in text


def test_ranks_give_signs_of_life(folder: Path) -> None:
    """The watchdog of an evaluation sees all of them, as in training."""
    found = read_heartbeats(folder / "continued")
    assert (sorted(found), {record["rank"] for record in found.values()}) == ([0, 1], {0, 1})
    assert {record["host"] for record in found.values()} == {socket.gethostname()}
    assert all(time.time() - 900 < record["since"] <= record["written"] for record in found.values())
    assert not list((folder / "continued" / "heartbeats").glob("*.stacks"))  # none hung


def test_a_continued_evaluation_is_the_same_bit_for_bit(folder: Path) -> None:
    assert (folder / "continued" / "responses.jsonl").read_bytes() == (folder / "whole" / "responses.jsonl").read_bytes()
    assert read_results(folder / "continued") == read_results(folder / "whole")


def test_a_megatron_checkpoint_is_the_same_model(folder: Path) -> None:
    assert (folder / "megatron" / "responses.jsonl").read_bytes() == (folder / "whole" / "responses.jsonl").read_bytes()


def test_the_evaluation_of_a_run_is_that_of_what_it_exported(folder: Path) -> None:
    run, exported = folder / "trained", folder / "exported"
    names = ("prompt_id", "sample_index", "correct", "score", "response_length", "finish_reason", "subsets")
    inside, outside = read_samples(run, "eval_step_0001"), read_records(exported)
    assert [[row[name] for name in names] for row in inside] == [[row[name] for name in names] for row in outside]
    assert sum("response" in row for row in inside) == 3
    sets = json.loads((run / "evaluations" / "step_0001.json").read_text(encoding="utf-8"))["sets"]
    assert sets == read_results(exported)["sets"]
    assert read_records(exported) != read_records(folder / "whole")  # the step did change the model
    metrics = read_metrics(run)[-1]
    assert metrics["eval/heldout/pass@3"] == sets["heldout"]["scores"]["pass@3"]["value"]
    assert metrics["eval/heldout/ci_low"] == sets["heldout"]["scores"]["avg@3"]["low"]


@pytest.mark.parametrize(
    ("checkpoint", "setting", "message"),
    [("nowhere", "seed=1", "nowhere' does not exist"), ("model", "data.eval=[]", "data.eval is empty")],
)
def test_faults_are_told_before_anything_starts(
    folder: Path, checkpoint: str, setting: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["eval", str(folder / "base.yaml"), "--checkpoint", str(folder / checkpoint), setting]) == 2
    assert message in capsys.readouterr().err


def test_another_evaluation_in_the_output_folder_is_told_before_a_model_is_loaded(folder: Path) -> None:
    arguments = [str(folder / "base.yaml"), "--checkpoint", str(folder / "model"), "--output", str(folder / "whole"), "seed=8"]
    result = run_command("eval", *arguments, "parallel.world_size=1")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "seed was 5, now it is 8" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_killed_and_continued_from_the_command_line(folder: Path, engine: str) -> None:
    """SIGKILL after the first chunk is on disk; the rest is made by a second call."""
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    output, reference = folder / f"killed_{engine}", folder / f"unkilled_{engine}"
    settings = ["parallel.world_size=1", f"rollout.engine={engine}", "eval.samples_per_prompt=3", "eval.responses_per_chunk=6"]
    command = [*CLI, str(folder / "base.yaml"), "--checkpoint", str(folder / "model"), *settings, "--output"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, str(output)], env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            progress = output / "progress.jsonl"
            if progress.is_file() and progress.read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    done = (output / "progress.jsonl").read_bytes().count(b"\n") - 1
    assert 1 <= done < 4, "killed too early or too late for this test to mean anything"
    for folder_of_results in (output, reference):
        result = run_bounded([*command, str(folder_of_results)], timeout=300)
        assert result.returncode == 0, result.stderr[-4000:]
        assert ("chunks are done already" in result.stdout) == (folder_of_results == output)
    assert (output / "responses.jsonl").read_bytes() == (reference / "responses.jsonl").read_bytes()
    assert read_results(output) == read_results(reference)
