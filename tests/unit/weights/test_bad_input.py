"""Damaged, hostile and impossible input of the converter: one clear message, exit code 2, nothing at the destination."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.torchrun import ROOT
from tests.unit.weights.models import read_safetensors
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights import command, writer
from vapo_mcore.weights.convert import hf_to_megatron
from vapo_mcore.weights.views import open_view

Folder = Callable[[str], Path]
INDEX = "model.safetensors.index.json"


def config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


def shard(folder: Path, name: str = "shard.safetensors") -> Path:
    """Turn the folder's one file into a shard with an index that calls it ``name``; returns the index."""
    weights = read_safetensors(folder)
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))
    return folder / INDEX


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def missing_shard(folder: Path) -> None:
    shard(folder, "model-00002-of-00002.safetensors")


def wrong_heads(folder: Path) -> None:
    config(folder, num_key_value_heads=4)


def not_a_number(folder: Path) -> None:
    weights: dict[str, Tensor] = read_safetensors(folder)
    weights["model.layers.2.mlp.down_proj.weight"][-1, -1] = float("nan")
    save_file(weights, folder / "model.safetensors")


def unknown_family(folder: Path) -> None:
    config(folder, model_type="qwen3_omni_moe")


def pickled(folder: Path) -> None:
    torch.save(read_safetensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def absolute_path(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder.parent / "outside.safetensors")
    shard(folder, str(folder.parent / "outside.safetensors"))


def parent_path(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder.parent / "outside.safetensors")
    shard(folder, "../outside.safetensors")


def link_outside(folder: Path) -> None:
    shard(folder)
    (folder / "shard.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "shard.safetensors").symlink_to("../outside.safetensors")


def dangling_link(folder: Path) -> None:
    shard(folder)
    (folder / "shard.safetensors").unlink()
    (folder / "shard.safetensors").symlink_to("nowhere.safetensors")


def companion_outside(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (truncated, r"model\.safetensors is truncated: it has \d+ bytes, tensor \S+ ends at byte \d+"),
    (missing_shard, r"names files that do not exist: model-00002-of-00002\.safetensors"),
    (wrong_heads, r"k_proj\.weight has shape \[16, 32\], expected \[32, 32\](.|\n)*check num_key_value_heads = 4"),
    (not_a_number, r"NaN or infinite weights in model\.layers\.2\.mlp\.down_proj\.weight"),
    (unknown_family, r"model_type 'qwen3_omni_moe' is not supported .*nearest supported: 'qwen3_moe'"),
    (pickled, r"only pickled weights \(pytorch_model\.bin\), which are not loaded because a pickle can run code"),
    (absolute_path, r"points to '/\S*outside\.safetensors'; only plain \*\.safetensors names inside the folder"),
    (parent_path, r"points to '\.\./outside\.safetensors'; only plain"),
    (link_outside, r"shard\.safetensors is a symbolic link to \S*/outside\.safetensors, outside the model folder"),
    (dangling_link, r"shard\.safetensors is a symbolic link to \S*/nowhere\.safetensors, which is not a file"),
    (companion_outside, r"tokenizer\.json is a symbolic link to \S*/secret, outside the model folder"),
    (no_weights, r"neither model\.safetensors nor"),
]


@pytest.mark.parametrize(("damage", "message"), FAULTS, ids=[damage.__name__ for damage, _ in FAULTS])
def test_damaged_folders(
    damage: Callable[[Path], None], message: str, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(hf_folder("llama"), folder)
    damage(folder)
    before = set(tmp_path.rglob("*"))
    capsys.readouterr()
    assert command.main(["hf-to-megatron", str(folder), str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert re.search(message, shown.err), shown.err
    assert set(tmp_path.rglob("*")) == before


def test_files_of_a_hub_cache_are_links_that_are_followed(hf_folder: Folder, tmp_path: Path) -> None:
    """``snapshots/REVISION/NAME -> ../../blobs/DIGEST``"""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1234", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(hf_folder("llama").iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    report = hf_to_megatron(snapshot, tmp_path / "out")
    assert report.tensors == len(read_safetensors(hf_folder("llama")))
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_the_destination_is_never_touched(kind: str, hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
        (out / "mine").write_text("mine")
    else:
        out.symlink_to("nowhere")
    for action in ("hf-to-megatron", "megatron-to-hf"):
        assert command.main([action, str(hf_folder("llama")), str(out)]) == 2
        assert "already exists and is not overwritten" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["mine", "out"] if kind == "folder" else ["out"])


def test_no_room_is_noticed_before_anything_is_written(
    hf_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_to_megatron(hf_folder("llama"), tmp_path / "megatron")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _path: SimpleNamespace(free=100))
    for action, source in (("hf-to-megatron", hf_folder("llama")), ("megatron-to-hf", tmp_path / "megatron")):
        assert command.main([action, str(source), str(tmp_path / "out")]) == 2
        assert re.search(r"no space left: \S+ has 0\.000 GB free, the model takes 0\.000 GB", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_broken_runs_leave_nothing_that_looks_complete(hf_folder: Folder, tmp_path: Path) -> None:
    hf_to_megatron(hf_folder("llama"), tmp_path / "megatron")
    work = tmp_path / "work"
    work.mkdir()
    script = str(Path(__file__).with_name("broken_runs.py"))
    command_line = [sys.executable, script, str(hf_folder("llama")), str(tmp_path / "megatron"), str(work)]
    result = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r"^(?:error: (.*)\n)?(\S+) (\S+) status (-?\d+)$", result.stdout, re.MULTILINE)
    assert len(found) == 10, result.stdout
    reason = "a file would exceed the file-size limit (ulimit -f, or the file system's)"
    for message, action, case, status in found:
        killed = case.startswith("killed")
        assert status == ("-9" if killed else "2"), result.stdout
        assert killed or f"{reason} while writing {work / f'{action}-{case}'}; nothing was published" in message
        left = [path for path in work.iterdir() if f"{action}-{case}" in path.name]
        assert [re.sub(r"\d+$", "", path.name) for path in left] == ([f".{action}-{case}.incomplete-"] if killed else [])
        if killed and case != "killed-last":  # unlike that one's, its files are incomplete too
            with pytest.raises(CheckpointError):
                open_view(left[0])
