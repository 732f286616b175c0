"""Checkpoint folders: names, manifest, publishing, damage, retention, space."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from vapo_mcore import checkpoint_files as files
from vapo_mcore.checkpoint_files import Manifest
from vapo_mcore.errors import CheckpointError

MANIFEST = Manifest("rl", 7, "dp_reshardable", {"policy": 14}, {"world_size": 2}, {"reward/mean": 0.5}, "0.1.0")


def written(run: Path, manifest: Manifest = MANIFEST) -> Path:
    """A published checkpoint with one file."""
    folder = files.incomplete(run, manifest.name)
    (folder / "policy").mkdir(parents=True)
    entry = files.write_durably(folder / "policy" / "data", b"numbers")
    complete = Manifest(**{**manifest.__dict__, "files": {"policy/data": entry}})
    complete.write(folder)
    return files.publish(folder, complete)


def test_a_checkpoint_has_its_name_only_once_it_is_complete(tmp_path: Path) -> None:
    folder = files.incomplete(tmp_path, MANIFEST.name)
    (folder / "policy").mkdir(parents=True)
    assert files.list_checkpoints(tmp_path) == []
    files.remove_leftovers(tmp_path)
    assert not folder.exists()
    path = written(tmp_path)
    assert path.name == "step_000007"
    assert files.list_checkpoints(tmp_path) == [path]
    manifest = Manifest.read(path)
    assert (manifest.step, manifest.updates, manifest.metrics) == (7, {"policy": 14}, {"reward/mean": 0.5})
    assert files.faults_of(path, manifest, manifest.files) == []


def test_order_is_that_of_the_run(tmp_path: Path) -> None:
    for stage, step in (("rl", 2), ("value_pretraining", 12), ("rl", 10), ("value_pretraining", 3)):
        written(tmp_path, Manifest(**{**MANIFEST.__dict__, "stage": stage, "step": step}))
    names = [path.name for path in files.list_checkpoints(tmp_path)]
    assert names == ["value_pretraining_000003", "value_pretraining_000012", "step_000002", "step_000010"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "policy/data is missing"),
        (lambda file: file.write_bytes(b"num"), "policy/data has 3 bytes instead of 7"),
        (lambda file: file.write_bytes(b"numbprs"), "policy/data has changed since it was written (SHA-256 differs)"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    path = written(tmp_path)
    damage(path / "policy" / "data")  # type: ignore[operator]
    manifest = Manifest.read(path)
    assert files.faults_of(path, manifest, manifest.files) == [message]


def test_an_earlier_name_of_the_unscheduled_updates_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, Manifest(**{**MANIFEST.__dict__, "unscheduled_updates": {"policy": 3}}))
    text = (path / files.MANIFEST_NAME).read_text()
    assert text.count("unscheduled_updates") == 1
    (path / files.MANIFEST_NAME).write_text(text.replace("unscheduled_updates", "aside_updates"))
    assert Manifest.read(path).unscheduled_updates == {"policy": 3}


def test_a_damaged_or_later_manifest_is_told(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = json.loads((path / "manifest.json").read_text())
    for change, message in (
        ({"format_version": 99, "package_version": "9.0"}, "written by vapo-mcore 9.0"),
        ({"files": {"../../outside": [1, "x"]}}, "not inside the checkpoint"),
        ({"step": None, "surplus": 1}, "cannot be read"),
    ):
        (path / "manifest.json").write_text(json.dumps(content | change))
        with pytest.raises(CheckpointError, match=message):
            Manifest.read(path)
    (path / "manifest.json").write_text('{"stage": "rl"')
    with pytest.raises(CheckpointError, match="cannot be read"):
        Manifest.read(path)


def test_publishing_over_an_abandoned_future_keeps_it_aside(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path)
    assert first == second
    assert sorted(path.name for path in first.parent.iterdir()) == ["step_000007", "step_000007.set_aside"]
    assert files.set_aside(second).name == "step_000007.set_aside2"


def test_deletion_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    path = written(tmp_path)
    with mock.patch.object(files.shutil, "rmtree"):  # killed in the middle
        files.delete(path)
    assert files.list_checkpoints(tmp_path) == []
    files.remove_leftovers(tmp_path)
    assert list(path.parent.iterdir()) == []


def test_retention() -> None:
    scores = [0.5, 0.9, None, 0.9, 0.1, 0.2]
    found = {f"step_{n:06d}": replace(MANIFEST, metrics={} if score is None else {"eval": score}) for n, score in enumerate(scores)}

    def left(**settings: object) -> list[int]:
        gone = files.to_delete(found, **{"keep_last": 1, "keep_best": 0, "best_metric": None, **settings})  # type: ignore[arg-type]
        return [int(name[-1]) for name in found if name not in gone]

    assert left() == [5]
    assert left(keep_last=3) == [3, 4, 5]
    assert left(keep_best=1, best_metric="eval") == [3, 5]  # of two best the newer
    assert left(keep_best=3, best_metric="eval") == [0, 1, 3, 5]
    assert left(keep_last=99) == [0, 1, 2, 3, 4, 5]
    for number in (0, 2):
        found[f"step_{number:06d}"] = replace(MANIFEST, optimizer_format="fully_reshardable")
    assert left() == [2, 5]  # the newest that loads at any layout, in addition to the others
    assert left(keep_last=4) == [2, 3, 4, 5]
    assert left(keep_best=1, best_metric="eval") == [2, 3, 5]
    found["step_000003"] = replace(MANIFEST, updates={"policy": 0})  # no optimizer state that would bind it to its layout
    assert left() == [3, 5]


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    files.require_space(tmp_path, 10**9, free=lambda _: 2 * 10**9)
    with pytest.raises(CheckpointError, match=r"has 1.00 GB free, it takes 1.0\d GB"):
        files.require_space(tmp_path, 10**9, free=lambda _: 10**9)


def test_hashing_a_large_file_gives_signs_of_life(tmp_path: Path) -> None:
    path = written(tmp_path)
    with mock.patch.object(files, "_PIECE_BYTES", 2), mock.patch.object(files.heartbeat, "alive") as alive:
        assert files.faults_of(path, Manifest.read(path), ["policy/data"]) == []
    assert alive.call_count == 4  # 7 bytes
