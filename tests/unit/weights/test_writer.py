"""Written folders are read by the official libraries; a failed run leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.unit.weights.models import read_safetensors
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights import writer
from vapo_mcore.weights.reader import SafetensorsFolder
from vapo_mcore.weights.writer import SafetensorsWriter, copy_companions, new_folder


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 8), "b": (16,), "big": (50, 4), "c": (1,), "empty": (0, 2)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16 if name == "b" else torch.float32) for name, shape in shapes.items()
    }


def manifest(content: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in content.items()}


@pytest.mark.parametrize(("limit", "files"), [(10_000, 1), (200, 3), (1, 5)])
def test_shards_and_index(tmp_path: Path, limit: int, files: int) -> None:
    content = tensors()
    with SafetensorsWriter(tmp_path, manifest(content), max_shard_bytes=limit) as out:
        for name in reversed(content):  # any order
            out.write(name, content[name])
    shards = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(shards) == files
    loaded = read_safetensors(tmp_path)
    assert loaded.keys() == content.keys()
    assert all(torch.equal(loaded[name], content[name]) and loaded[name].dtype == content[name].dtype for name in content)
    with SafetensorsFolder(tmp_path) as folder:
        assert all(torch.equal(folder.read(name), content[name]) for name in content)
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in content.values())
        assert shards[0] == f"model-00001-of-{files:05d}.safetensors"
    else:
        assert shards == ["model.safetensors"]


def test_a_written_tensor_can_still_leave_the_device(tmp_path: Path) -> None:
    """Offloading empties the storage of parameters, of which exported tensors are views."""
    storage = torch.arange(12.0)
    with SafetensorsWriter(tmp_path, {"a": ((2, 4), torch.float32)}) as out:
        out.write("a", storage[2:10].view(2, 4))
    assert torch.equal(read_safetensors(tmp_path)["a"], torch.arange(2.0, 10.0).view(2, 4))
    storage.untyped_storage().resize_(0)


def test_each_tensor_exactly_once(tmp_path: Path) -> None:
    content = tensors()
    with pytest.raises(AssertionError, match="never written: \\['b'"), SafetensorsWriter(tmp_path, manifest(content)) as out:  # noqa: PT012
        for name in ("a", "c", "empty"):
            out.write(name, content[name])
        with pytest.raises(AssertionError, match="a is not in the manifest or was written before"):
            out.write("a", content["a"])
        with pytest.raises(AssertionError, match="the manifest says"):
            out.write("big", content["a"])


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), new_folder(tmp_path / "out") as folder:  # noqa: PT012
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
        raise RuntimeError("boom")
    assert list(tmp_path.iterdir()) == []


def test_existing_destinations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("dangling", "empty"):
        with pytest.raises(CheckpointError, match=f"{name} already exists and is not overwritten"), new_folder(tmp_path / name):
            pytest.fail("the body must not run")


def test_a_destination_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists"), new_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tensors()
    with monkeypatch.context() as patch:
        patch.setattr(writer.shutil, "disk_usage", lambda _path: SimpleNamespace(free=100))
        with pytest.raises(CheckpointError, match=r"no space left: .* the model takes"), new_folder(tmp_path / "out") as folder:
            SafetensorsWriter(folder, manifest(content))

    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "pwrite", full)
        with pytest.raises(CheckpointError, match="no space left on the disk"), new_folder(tmp_path / "out") as folder:
            SafetensorsWriter(folder, manifest(content))
    assert list(tmp_path.iterdir()) == []


def test_companions(tmp_path: Path, hf_folder: Callable[[str], Path]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    original = hf_folder("qwen2_tied")
    (source / "config.json").write_bytes((original / "config.json").read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "merges.txt", "LICENSE"):
        (source / name).write_text(name)
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "optimizer.pt", "checksums.json"):
        (source / name).write_text("weights")
    arch = read_architecture(source)
    copied = copy_companions(source, target, arch, role="policy", dtype=torch.float32)
    assert copied == ["LICENSE", "chat_template.jinja", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"]
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert {key for key in before if before[key] != after[key]} == {"dtype"}
    assert after["dtype"] == "float32"
    copy_companions(source, target, arch, role="critic", dtype=torch.float32)
    assert json.loads((target / "config.json").read_text())["architectures"] == ["Qwen2ForTokenClassification"]
    assert read_architecture(target) == arch
