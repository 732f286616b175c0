"""Damaged and hostile model folders are refused by name; partial reads are exact."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights import reader
from vapo_mcore.weights.reader import SafetensorsFolder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    save_file({"a": torch.randn(7, 5, generator=generator), "scalar": torch.tensor(3.0)}, tmp_path / "one.safetensors")
    save_file({"b": torch.randn(4, generator=generator).bfloat16(), "empty": torch.zeros(0, 3)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "scalar": "one.safetensors", "b": "two.safetensors", "empty": "two.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(folder)


def test_tensors_and_parts_are_exact(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_READ_BYTES", 45)  # two rows of "a" at a time
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 5, generator=generator), torch.randn(4, generator=generator).bfloat16()
    with SafetensorsFolder(sharded) as folder:
        assert folder.shapes == {"a": (7, 5), "scalar": (), "b": (4,), "empty": (0, 3)}
        assert torch.equal(folder.read("a"), a)
        assert torch.equal(folder.read("a", rows=(2, 6)), a[2:6])
        assert torch.equal(folder.read("a", columns=(1, 4)), a[:, 1:4])
        assert torch.equal(folder.read("a", rows=(1, 6), columns=(4, 5)), a[1:6, 4:5])
        assert torch.equal(folder.read("b", rows=(1, 3)), b[1:3])
        assert folder.read("scalar").item() == 3.0
        assert folder.read("empty").shape == (0, 3)
        with pytest.raises(CheckpointError, match="no tensor 'c'"):
            folder.read("c")


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/evil.safetensors", "sub/evil.safetensors", "..\\evil.safetensors", "a.bin", 3]
)
def test_path_tricks_in_the_index_are_refused(sharded: Path, name: object) -> None:
    save_file({"a": torch.zeros(1)}, sharded.parent / "evil.safetensors")
    write_index(sharded, {"a": name})
    refused(sharded, r"tensor a points to .*; only plain \*\.safetensors names")


def test_index_and_files_must_agree(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "empty": "two.safetensors", "c": "two.safetensors"})
    refused(sharded, "c is not in two.safetensors; scalar of one.safetensors is not in the index")
    write_index(sharded, {"a": "one.safetensors", "b": "three.safetensors"})
    refused(sharded, "names files that do not exist: three.safetensors")
    (sharded / "model.safetensors.index.json").write_text("{]")
    refused(sharded, "not a safetensors index")
    (sharded / "model.safetensors.index.json").write_text("[" * 100_000)
    refused(sharded, "not a safetensors index")
    write_index(sharded, [])
    refused(sharded, "weight_map must be a non-empty mapping")


@pytest.mark.parametrize("kept", [0, 5, 40, 200])
def test_truncated_files_are_refused_before_anything_is_read(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(64)}, file)
    assert file.stat().st_size > 200
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path, "model.safetensors is truncated")


def write_raw(file: Path, header: object, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "malformed safetensors header"),
        ([1], b"", "expected a mapping"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 12, "its header describes"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"\0" * 8, "cannot occupy 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"\0" * 8, "malformed header entry"),
        ({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"\0" * 2, "dtype F8_E4M3; supported:"),
        ({"a": {"shape": [2]}}, b"", "malformed header entry"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
            b"\0" * 12,
            "overlap or leave gaps",
        ),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, message)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, r"only pickled weights \(pytorch_model.bin\)")


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    save_file({"b": torch.zeros(1), "a": torch.zeros(1)}, sharded / "two.safetensors")
    write_index(sharded, {"a": "one.safetensors", "scalar": "one.safetensors", "b": "two.safetensors"})
    refused(sharded, "tensor a is in two files")


def test_equal_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_READ_BYTES", 45)
    one = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[5, 4] += 1
    save_file({"one": one, "same": one.clone(), "other": other, "short": one[:6].clone()}, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.equal("one", "same")
        assert not folder.equal("one", "other")
        assert folder.equal("one", "other", (0, 5))
        assert not folder.equal("one", "short")
