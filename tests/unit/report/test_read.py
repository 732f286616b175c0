"""Run directories as the report reads them, whole, damaged, being written, and what is no run at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vapo_mcore.cli import main
from vapo_mcore.errors import ConfigError, DataError
from vapo_mcore.report.page import page_data
from vapo_mcore.report.read import evenly, read_runs


def write_run(folder: Path, rows: list[dict[str, Any]], samples: dict[str, list[dict[str, Any]]] | None = None) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, found in (samples or {}).items():
        (folder / "samples" / f"{name}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in found), encoding="utf-8")
    return folder


def test_samples_come_with_their_step_in_the_order_of_numbers(tmp_path: Path) -> None:
    files = {"step_0002": (2,), "step_10000": (3,), "step_0001": (0, 1), "value_pretraining_0001": (9,)}
    files |= {f"eval_step_{step:04d}": (10 + step,) for step in range(3)}
    samples = {name: [{"prompt_id": "p", "correct": True, "a": number} for number in numbers] for name, numbers in files.items()}
    (run,) = read_runs([write_run(tmp_path / "run", [{"step": 1, "stage": "rl"}], samples)])
    assert [(sample["a"], sample["step"], sample["stage"]) for sample in run.samples] == [
        (n, s, "rl") for n, s in enumerate((1, 1, 2, 10000))
    ]
    assert run.sample_files == (3, 3)
    assert {step: [sample["a"] for sample in found] for step, found in run.evaluated.items()} == {0: [10], 2: [12]}
    assert (run.name, run.settings, run.finished) == ("run", {}, False)


def test_of_many_files_evenly_spaced_ones_with_both_ends() -> None:
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9]
    assert evenly([1, 2], 4) == [1, 2]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", [{"step": 1}]) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]
    with pytest.raises(ConfigError, match="given more than once"):
        read_runs([folders[0], tmp_path / "b" / ".." / "a" / "run"])


def test_what_is_being_written_is_left_out_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    sample = {"prompt_id": "p", "correct": True, "response": "a\u2028b"}
    folder = write_run(tmp_path / "run", [{"step": 1}], {"step_0001": [sample]})
    file = folder / "samples" / "step_0001.jsonl"
    file.write_text(json.dumps(sample, ensure_ascii=False) + '\n{"prompt_id": "q", "corr', encoding="utf-8")
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 2, "rew')
    (run,) = read_runs([folder])
    assert run.rows == [{"step": 1}]
    assert run.samples == [sample | {"step": 1, "stage": "rl"}]
    for text, message in ((b"{]", "line 1: not JSON"), (b"\xff", "line 1: not JSON"), (b"[1]", "expected an object with 'prompt_id'")):
        file.write_bytes(text + b"\n")
        with pytest.raises(DataError, match=message):
            read_runs([folder])
    file.unlink()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{]\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        read_runs([folder])


def test_what_is_no_run_is_told_all_at_once_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, evaluated = write_run(tmp_path / "empty", []), write_run(tmp_path / "evaluated", [{"step": 0, "eval/set/avg@1": 0.5}])
    assert main(["report", str(tmp_path), str(empty), str(evaluated), str(tmp_path / "absent")]) == 2
    told = capsys.readouterr().err
    assert told.count("has no row of a step yet") == 2
    for text in (f"{tmp_path} is not a run directory", "the folder does not exist"):
        assert text in told
    fine = write_run(tmp_path / "fine", [{"step": 1, "stage": "rl", "reward/mean": 1.0}])
    assert main(["report", str(fine), "--output", str(fine / "metrics.jsonl" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not (fine / "report.html").exists()
    assert main(["report", str(fine), "--title", "<mine>"]) == 0
    assert "<title>&lt;mine&gt;</title>" in (fine / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "the run has no config.yaml"),
        (b"", "config.yaml: expected a mapping of settings"),
        (b"a: [1\n", "config.yaml: not valid YAML"),
        (b"a: \xff\n", "config.yaml cannot be read: 'utf-8' codec"),
        (b"a: " + b"[" * 1_000, "config.yaml: not valid YAML"),
        (b"run: {steps: .nan}\nrollout: {max_response_length: [1, .inf]}\nmodel: {path: .nan}\n", None),
    ],
)
def test_without_settings_there_is_a_page_that_says_so(tmp_path: Path, content: bytes | None, expected: str | None) -> None:
    folder = write_run(tmp_path / "run", [{"step": 1, "reward/mean": 1.0}])
    if content is not None:
        (folder / "config.yaml").write_bytes(content)
    assert main(["report", str(folder)]) == 0
    (data,) = page_data(read_runs([folder]), "title")["runs"]
    if expected is None:
        assert (data["longest"], data["summary"]["planned"], data["summary"]["model"]) == (None, None, None)
        assert "this version cannot read config.yaml" in data["diagnosis"]["failure"]
    else:
        assert expected in data["diagnosis"]["failure"]
        assert any(expected in text and "Settings and length bins" in text for text in data["missing"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"reward": "1"}, "'reward' is neither a number nor null"),
        ({"score": 10**400}, "'score' is neither a number nor null"),
        ({"response_length": None}, "'response_length' is not a whole number from 0 to 2**31 - 1"),
        ({"prompt_id": ["p"]}, "'prompt_id' is not text"),
        ({"correct": "yes"}, "'correct' is neither true nor false"),
        ({"error": 3, "answer": [1]}, "'error' is neither text nor null; 'answer' is neither text nor null"),
        ({"segments": [[4, 1], [2]]}, "'segments' is not a list of pairs of whole numbers"),
        ({"tokens": 7}, "'tokens' is not an object of lists"),
        ({"tokens": {"text": "ab"}}, "'tokens' is not an object of lists"),
        ({"tokens": {"value": [1]}}, "'tokens' is not an object of lists that include 'text'"),
        ({"tokens": {"text": ["a", 1]}}, "'tokens.text' is not a list of texts"),
        ({"tokens": {"text": ["a"], "value": ["b"]}}, "'tokens.value' is not a list of numbers and nulls"),
        ({"tokens": {"text": ["a"], "value": [1, None]}}, "'tokens.value' has 2 entries for 1 tokens"),
    ],
)
@pytest.mark.parametrize("name", ["step_0001", "eval_step_0000"])
def test_samples_that_no_trainer_writes_are_named_with_their_line(
    tmp_path: Path, name: str, change: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"prompt_id": "p", "correct": True}
    samples = {"eval_step_0000": [good], "eval_step_0001": [good]} | {name: [good, good | change]}
    folder = write_run(tmp_path / "run", [{"step": 1}], samples)
    assert main(["report", str(folder)]) == 2
    assert f"{folder}/samples/{name}.jsonl, line 2: {expected}" in capsys.readouterr().err


def test_numbers_of_a_run_that_diverged_are_undefined_and_deep_lists_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    sample = {"prompt_id": "p", "correct": False, "response": "ab", "reward": nan, "score": float("-inf"), "finish_reason": "stop"}
    sample["tokens"] = {"text": ["a", "b"], "value": [nan, 0.5]}
    folder = write_run(tmp_path / "run", [{"step": 1}], {"step_0001": [sample]})
    assert main(["report", str(folder)]) == 0
    (record,) = page_data(read_runs([folder]), "title")["runs"][0]["samples"]["records"]
    assert (record["reward"], record["score"], record["tokens"]["value"]) == (None, None, [None, 0.5])
    (folder / "samples" / "step_0001.jsonl").write_text("[" * 200_000 + "\n")
    assert main(["report", str(folder)]) == 2
    assert "step_0001.jsonl, line 1: not JSON" in capsys.readouterr().err


def test_a_folder_whose_name_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"r\xffn"), [{"step": 1, "reward/mean": 1.0}])
    assert main(["report", str(folder)]) == 0
    assert "<title>r\\udcffn</title>" in (folder / "report.html").read_text(encoding="utf-8")
    assert "r\\udcffn/report.html" in capsys.readouterr().out
