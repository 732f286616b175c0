"""The diagnosis of a run that is there, from its files."""

import sys
from pathlib import Path

import diagnose
import pytest

from tests.unit.config_helpers import write_base
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.errors import DataError
from vapo_mcore.records.run_dir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = load_config(write_base(tmp_path))
    made = RunDirectory.create(config.run.dir, clean=False, config_yaml=dump_yaml(config))
    for step, skipped in ((1, 0), (2, 1), (3, 2), (4, 0)):
        made.write_metrics({"step": step, "stage": "rl", "policy/updates_skipped": skipped})
    made.close()
    return made.path


def told(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *settings: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["diagnose.py", str(run), *settings])
    diagnose.main()
    return capsys.readouterr().out.splitlines()


def test_each_rule_is_told_once_with_its_steps(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = told(run, monkeypatch, capsys)
    assert first.startswith("rl step 2: skipped_updates: 1 updates of the policy and 0 of the critic were skipped in step 2")
    assert last == "diagnosis/skipped_updates: 2 steps"
    assert told(run, monkeypatch, capsys, "diagnosis.skipped_updates=null") == ["nothing found in 4 rows"]


def test_a_run_without_rows_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "metrics.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", ["diagnose.py", str(run)])
    with pytest.raises(DataError, match="give a run directory that has a"):
        diagnose.main()
