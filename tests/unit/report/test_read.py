"""Run directories as the report reads them, whole, damaged, being written, and what is no run at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vapo_mcore.cli import main
from vapo_mcore.errors import ConfigError, DataError
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
    for text in (f"{tmp_path} is not a run directory", "there is no such folder"):
        assert text in told
    broken = write_run(tmp_path / "broken", [{"step": 1}])
    (broken / "config.yaml").write_text("a: [1\n")
    assert main(["report", str(broken)]) == 2
    assert "config.yaml: not valid YAML" in capsys.readouterr().err
    fine = write_run(tmp_path / "fine", [{"step": 1, "stage": "rl", "reward/mean": 1.0}])
    assert main(["report", str(fine), "--output", str(fine / "metrics.jsonl" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not (fine / "report.html").exists()
    assert main(["report", str(fine), "--title", "<mine>"]) == 0
    assert "<title>&lt;mine&gt;</title>" in (fine / "report.html").read_text()
