"""When the best policy is exported, and how it takes the place of the last one."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from vapo_mcore.checkpoint.best_export import BestExport, best_folder, install_export, restore_best, staging_folder, step_of
from vapo_mcore.config.schema import BestExportConfig
from vapo_mcore.errors import CheckpointError

M = "eval/x/avg@1"


def exported_after(best: BestExport, scores: dict[int, float | None]) -> list[int]:
    """Steps after which a run with these scores exports."""
    steps = []
    for step, score in scores.items():
        found = best.improved(step, {M: score})
        if found is not None:
            best.exported(step, found)
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("mode", "every", "start", "scores", "expected"),
    [
        ("max", 1, 0.5, {1: 0.4, 2: 0.5, 3: 0.6, 4: 0.6, 5: 0.7}, [3, 5]),
        ("max", 1, None, {1: 0.0, 2: None, 3: math.nan, 4: 0.1}, [1, 4]),
        ("min", 1, 20.0, {1: 30.0, 2: 19.0, 3: 19.0, 4: 3.0}, [2, 4]),
        # 0.8 comes too soon after 0.7; what comes later must beat what lies in the folder, 0.7.
        ("max", 3, 0.0, {1: 0.7, 2: 0.8, 3: 0.6, 4: 0.75, 5: 0.9, 8: 0.9, 9: 0.76}, [1, 4, 8]),
    ],
)
def test_the_policy_is_exported_when_it_beats_the_last_export(
    mode: str, every: int, start: float | None, scores: dict[int, float | None], expected: list[int]
) -> None:
    best = BestExport(BestExportConfig.model_validate({"metric": M, "mode": mode, "every_steps": every}))
    best.start({M: start})
    assert exported_after(best, scores) == expected


def test_without_the_setting_nothing_is_exported() -> None:
    best = BestExport(None)
    best.start({M: 0.1})
    assert exported_after(best, {1: 0.5}) == []


def test_a_resumed_run_goes_on_with_the_best_score_known() -> None:
    best = BestExport(BestExportConfig(metric=M))
    assert exported_after(best, {1: 0.5}) == [1]
    state = json.loads(json.dumps(best.state_dict()))
    again = BestExport(BestExportConfig(metric=M))
    again.load_state_dict(state)
    assert exported_after(again, {2: 0.5, 3: 0.6}) == [3]
    other = BestExport(BestExportConfig(metric="eval/x/length_mean", mode="min"))
    other.load_state_dict(state)
    assert (other.step, other.score) == (0, None)


def test_an_export_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    for step in (4, 7):
        (tmp_path / "best_hf.step_000001").mkdir(exist_ok=True)  # of an export that was killed
        new = staging_folder(tmp_path, step)
        assert [path.name for path in tmp_path.iterdir()] == (["best_hf"] if step == 7 else [])
        new.mkdir()
        (new / "weights").write_text(str(step))
        install_export(new, tmp_path, {"metric": M, "score": 0.5, "step": step})
        assert [path.name for path in tmp_path.iterdir()] == ["best_hf"]
        assert (best_folder(tmp_path) / "weights").read_text() == str(step)
        assert json.loads((best_folder(tmp_path) / "best.json").read_text()) == {"metric": M, "score": 0.5, "step": step}


def test_an_export_that_cannot_be_put_in_place_leaves_the_last_one(tmp_path: Path) -> None:
    best_folder(tmp_path).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*best_hf"):
        install_export(tmp_path / "best_hf.step_000009", tmp_path, {})
    assert best_folder(tmp_path).is_dir()


def written(run_dir: Path, step: int) -> Path:
    new = staging_folder(run_dir, step)
    new.mkdir()
    (new / "weights").write_text(str(step))
    return new


@pytest.mark.parametrize(("killed_at", "step"), [("first rename", 4), ("second rename", 7), ("removal", 7)])
def test_a_replacement_that_was_killed_is_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, step: int) -> None:
    """At each place where a kill can fall there is a whole export, and the next start finds it."""
    install_export(written(tmp_path, 4), tmp_path, {"step": 4})
    new = written(tmp_path, 7)
    left = {"first rename": 0, "second rename": 1, "removal": 2}[killed_at]
    rename, done = Path.rename, []

    def die(path: Path, target: Path) -> Path:
        if path.name.startswith("best_hf"):
            if len(done) == left:
                raise KeyboardInterrupt
            done.append(path)
        return rename(path, target)

    def never(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        patch.setattr(shutil, "rmtree", never)
        with pytest.raises(KeyboardInterrupt):
            install_export(new, tmp_path, {"step": 7})
    assert (restore_best(tmp_path) is not None) == (killed_at == "second rename")
    assert step_of(best_folder(tmp_path)) == step
    assert (best_folder(tmp_path) / "weights").read_text() == str(step)
    assert restore_best(tmp_path) is None
    staging_folder(tmp_path, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["best_hf"]


def test_a_replacement_that_fails_in_the_middle_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_export(written(tmp_path, 4), tmp_path, {"step": 4})
    new, rename = written(tmp_path, 7), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == new:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            install_export(new, tmp_path, {"step": 7})
    assert step_of(best_folder(tmp_path)) == 4
    assert (best_folder(tmp_path) / "weights").read_text() == "4"


def test_the_old_export_comes_back_where_the_new_one_is_not_whole(tmp_path: Path) -> None:
    for name, info in (("best_hf.replaced", '{"step": 4}'), ("best_hf.step_000007", None)):
        (tmp_path / name).mkdir()
        if info is not None:
            (tmp_path / name / "best.json").write_text(info)
    assert restore_best(tmp_path) == tmp_path / "best_hf.replaced"
    assert step_of(best_folder(tmp_path)) == 4


def test_folders_of_the_user_beside_it_are_left_alone(tmp_path: Path) -> None:
    left = [tmp_path / name for name in ("best_hf.backup", "best_hf.step_four", "best_hf.replaced.txt")]
    own = [tmp_path / name for name in ("best_hf.step_000003", "best_hf.replaced")]
    for folder in left + own:
        folder.mkdir()
    assert staging_folder(tmp_path, 4).name == "best_hf.step_000004"
    assert sorted(tmp_path.iterdir()) == sorted(left)


def test_the_step_of_an_export(tmp_path: Path) -> None:
    assert step_of(tmp_path / "none") is None
    for text, step in (('{"step": 12}', 12), ('{"step": null}', None), ("{}", None), ("[]", None), ("{", None)):
        (tmp_path / "best.json").write_text(text)
        assert step_of(tmp_path) == step
