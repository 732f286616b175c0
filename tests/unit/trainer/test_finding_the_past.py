"""What ``--resume`` does where there is no checkpoint: a finished run is left alone, an unfinished one starts again and says so."""

from types import SimpleNamespace
from typing import Any

import pytest

from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.errors import ConfigError
from vapo_mcore.trainer import main


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(main, "choose", lambda *_: None)
    return []


def find(said: list[str]) -> Any:
    config: Any = SimpleNamespace(run=SimpleNamespace(dir="runs/x"))
    console: Any = SimpleNamespace(print=said.append)
    return main._find_past(config, ResumeOptions(), console)


def test_a_finished_run_without_a_checkpoint_is_not_begun_again(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "finished_steps", lambda _: 6)
    with pytest.raises(ConfigError, match=r"'runs/x' is finished \(6 steps\) and has no checkpoint to continue from"):
        find(said)


def test_an_unfinished_run_without_a_checkpoint_starts_and_says_so(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "finished_steps", lambda _: None)
    assert find(said) is None
    assert said == ["nothing to resume: runs/x has no checkpoint; starting from the beginning"]
