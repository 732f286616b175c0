"""The options of a resume, and a run that is finished, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config_helpers import write_base
from vapo_mcore.cli import main
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.records.run_dir import RunDirectory


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume", "--clean"], "--resume continues a run, --clean deletes it"),
        (["--resume-from", "step_000001", "--clean"], "--resume continues a run, --clean deletes it"),
        (["--allow-config-change"], "need --resume"),
        (["--restart-data"], "need --resume"),
    ],
)
def test_options_that_contradict_each_other(options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(write_base(tmp_path)), *options])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def finished_run(tmp_path: Path, steps: int) -> Path:
    base = write_base(tmp_path)
    run = RunDirectory.create(tmp_path / "run", clean=False, config_yaml="seed: 1\n")
    run.mark_finished(steps)
    run.close()
    return base


def test_a_finished_run_says_so_and_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = finished_run(tmp_path, 6)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert main(["train", str(base), "--resume"]) == 0
    assert "is finished (6 steps)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_checkpoint_that_is_named_is_gone_back_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or missed: never the answer that there is nothing to do."""
    base = finished_run(tmp_path, 6)
    (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000002" / "config.yaml").write_text(dump_yaml(load_config(base)))
    main(["train", str(base), "--resume-from", "step_000002", "--dry-run"])
    captured = capsys.readouterr()
    assert "nothing to resume" not in captured.out
    assert "has no checkpoint" not in captured.err
    for name in ("step_000001", "../../x", "../checkpoints/step_000002", "."):
        assert main(["train", str(base), "--resume-from", name, "--dry-run"]) == 2
        assert f"{tmp_path}/run/checkpoints has no checkpoint {name!r}; there are: step_000002" in capsys.readouterr().err


def test_a_dry_run_refuses_settings_that_no_checkpoint_can_be_continued_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = finished_run(tmp_path, 6)
    for step, overrides in ((1, []), (2, ["seed=8"])):
        folder = tmp_path / "run" / "checkpoints" / f"step_00000{step}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_yaml(load_config(base, overrides)))
    command = ["train", str(base), "--resume", "--dry-run", "run.steps=9"]
    assert main([*command, "seed=9"]) == 2
    assert "seed: 8 -> 9" in capsys.readouterr().err
    for allowed in ([], ["seed=8"], ["seed=9", "--allow-config-change"]):
        main([*command, *allowed])
        assert "affect what is learned" not in capsys.readouterr().err


def test_more_steps_than_the_finished_run_made_are_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    base = finished_run(tmp_path, 6)
    assert main(["train", str(base), "--resume", "--dry-run", "run.steps=7", f"run.dir={tmp_path}/foreign"]) == 2
    error = capsys.readouterr().err
    assert "holds files that are not a run of vapo-mcore" in error
    assert json.loads((tmp_path / "run" / "finished.json").read_text()) == {"steps": 6}
