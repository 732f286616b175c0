"""Writer of Hugging Face model folders: sharded safetensors, written tensor by tensor and published by one rename.

Shapes and dtypes are known in advance, so each shard's header is written first and every tensor directly at its offset; memory use is
one tensor, independent of the shard size.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vapo_mcore.checkpoint_files import sync_path
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.families import FAMILIES
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.plan import Role
from vapo_mcore.weights.reader import DTYPES, INDEX_NAME, SINGLE_NAME, require_inside

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
CHECKSUMS_NAME = "checksums.json"
"""File with HF name -> checksum of every tensor of a written model."""
_NOT_COPIED = {"config.json", INDEX_NAME, "pytorch_model.bin.index.json", CHECKSUMS_NAME}
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".spm")
_COPIED_NAMES = {"LICENSE", "NOTICE", "USE_POLICY"}

Manifest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@contextmanager
def new_folder(destination: str | Path) -> Iterator[Path]:
    """Create a temporary folder next to ``destination``; rename it to ``destination`` at the end, or delete it if the body fails.

    Raises CheckpointError if the destination exists or the disk is full.
    """
    destination = Path(destination)
    refuse_existing(destination)
    temporary = destination.parent / f".{destination.name}.incomplete-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            sync_path(path)
        refuse_existing(destination)
        temporary.rename(destination)
        sync_path(destination.parent)
    except OSError as error:
        reasons = {
            errno.ENOSPC: "no space left on the disk",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "a file would exceed the file-size limit (ulimit -f, or the file system's)",
        }
        if error.errno in reasons:
            raise CheckpointError(f"{reasons[error.errno]} while writing {destination}; nothing was published") from error
        raise CheckpointError(f"cannot write {destination}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(destination: str | Path) -> None:
    """Raise CheckpointError if ``destination`` exists."""
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} already exists and is not overwritten; choose another folder or remove it")


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise CheckpointError unless ``num_bytes`` fit on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(f"no space left: {folder.parent} has {free / 1e9:.3f} GB free, the model takes {num_bytes / 1e9:.3f} GB")


class SafetensorsWriter:
    """Writes the tensors of ``manifest`` (name -> (shape, dtype)) into ``folder``, in any order, each exactly once.

    Writes one ``model.safetensors``, or shards of at most ``max_shard_bytes`` (a larger tensor gets a separate one) with an index, named
    like those of transformers. Use as a context manager: leaving it checks that every tensor was written.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES) -> None:
        assert manifest, "nothing to write"
        self.folder = Path(folder)
        self._left = set(manifest)
        self._manifest = manifest
        shards = _shards(manifest, max_shard_bytes)
        count = len(shards)
        names = [SINGLE_NAME] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        total = sum(_num_bytes(shape, dtype) for shape, dtype in manifest.values())
        require_space(self.folder, total)
        self._descriptors: list[int] = []
        self._places: dict[str, tuple[int, int]] = {}
        for name, tensors in zip(names, shards, strict=True):
            self._start_shard(self.folder / name, tensors)
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
            write_json(self.folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _start_shard(self, file: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            shape, dtype = self._manifest[name]
            start, end = end, end + _num_bytes(shape, dtype)
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._descriptors.append(descriptor)
        _write_all(descriptor, memoryview(len(encoded).to_bytes(8, "little") + encoded), 0)
        os.posix_fallocate(descriptor, 0, 8 + len(encoded) + end)
        for name in names:
            self._places[name] = (descriptor, 8 + len(encoded) + header[name]["data_offsets"][0])

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to the manifest's dtype."""
        assert name in self._left, f"{name} is not in the manifest or was written before"
        shape, dtype = self._manifest[name]
        assert tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, the manifest says {shape}"
        data = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1).view(torch.uint8)
        descriptor, offset = self._places[name]
        # data.numpy() would make the whole storage not resizable, also if it holds a model's parameters, which offloading empties.
        _write_all(descriptor, memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())), offset)
        self._left.discard(name)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        if kind is None:
            assert not self._left, f"never written: {sorted(self._left)[:5]}"


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shards(manifest: Manifest, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in manifest.items():
        tensor_bytes = _num_bytes(shape, dtype)
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor_bytes
    return shards


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + (1 << 30)], offset + done)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def companion_files(source: str | Path) -> list[Path]:
    """Return the files to copy along with the weights: tokenizer, chat template, generation config, licence.

    ``config.json`` is not included; :func:`copy_companions` adapts it. Raises CheckpointError for symbolic links out of the folder.
    """
    files = []
    for file in sorted(Path(source).iterdir()):
        weights = file.name.endswith(_WEIGHT_SUFFIXES) or file.name in _NOT_COPIED
        if file.is_file() and not weights and (file.name.endswith(_COPIED_SUFFIXES) or file.name in _COPIED_NAMES):
            require_inside(Path(source), file)
            files.append(file)
    return files


def copy_companions(source: str | Path, folder: Path, architecture: ModelArchitecture, *, role: Role, dtype: torch.dtype) -> list[str]:
    """Copy everything except the weights of a model folder; returns the names of the copied files.

    Call it after the weights are written: ``config.json`` marks a complete model folder. In ``config.json`` only the dtype changes and,
    for a critic, the class: a token classifier with one label, transformers' form of a scalar head on every token.
    """
    source = Path(source)
    files = companion_files(source)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    write_json(folder / "config.json", _config(source, architecture, role, dtype))
    return [file.name for file in files]


def _config(source: Path, architecture: ModelArchitecture, role: Role, dtype: torch.dtype) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    prefix = FAMILIES[architecture.family].hf_class
    if role == "critic":
        # transformers has no class with a two-layer head; declare the trunk model
        config["architectures"] = [f"{prefix}Model" if architecture.mlp_value_head else f"{prefix}ForTokenClassification"]
        config["value_head"] = "mlp" if architecture.mlp_value_head else "linear"
        bins = architecture.value_bins
        names = ["value"] if bins is None else [f"bin {number}" for number in range(bins.bins)]
        config["id2label"] = {str(number): name for number, name in enumerate(names)}
        config["label2id"] = {name: number for number, name in enumerate(names)}
        if bins is not None:
            config["value_bins"] = asdict(bins)
    else:
        config["architectures"] = [f"{prefix}ForCausalLM"]
    return config
