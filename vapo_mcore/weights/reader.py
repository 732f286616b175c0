"""Reader of safetensors folders: names, shapes and dtypes from the headers, and tensors or parts of them on demand.

Uses positioned reads instead of a memory map, so that resident memory is limited to what the caller holds. Opening a folder checks
headers and sizes of all its files before any tensor is read.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vapo_mcore.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported dtypes. Quantised ones are rejected, because their tensors are meaningless without the scales."""
_MAX_HEADER_BYTES = 100_000_000
_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor; ``start`` is the byte offset in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFolder:
    """A Hugging Face model folder with one ``model.safetensors`` or an index and its shards. Use as a context manager.

    Raises CheckpointError if the folder holds no safetensors (pickled weights are rejected), the index names a missing file or tensor,
    a file is truncated or malformed, or a dtype is not in :data:`DTYPES`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._descriptors: dict[Path, int] = {}
        files = _weight_files(self.folder)
        index = _read_index(self.folder / INDEX_NAME) if (self.folder / INDEX_NAME).exists() else None
        if index is not None:
            files = [self.folder / name for name in sorted(set(index.values()))]
            absent = [file.name for file in files if not file.is_file() and not file.is_symlink()]
            if absent:
                raise CheckpointError(f"{self.folder / INDEX_NAME} names files that do not exist: {', '.join(absent)}")
        self._infos: dict[str, TensorInfo] = {}
        for file in files:
            require_inside(self.folder, file)
            for name, info in read_header(file).items():
                if name in self._infos:
                    raise CheckpointError(f"tensor {name} is in two files: {self._infos[name].file} and {file}")
                self._infos[name] = info
        if index is not None:
            _compare_with_index(self.folder / INDEX_NAME, index, self._infos)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    @property
    def files(self) -> list[Path]:
        """Weight files of the folder, in name order."""
        return sorted({info.file for info in self._infos.values()})

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self._infos.values())

    def info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        return self._infos[name]

    def tensor(self, name: str) -> FolderTensor:
        """Return a handle that reads the tensor, or a part of it, on demand."""
        return FolderTensor(self, name, self.info(name))

    def read(self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor in its stored dtype. ``rows``, ``columns``: (start, stop) of the first and second dimension."""
        return self.tensor(name).read(rows, columns)

    def equal(self, one: str, other: str, rows: tuple[int, int] | None = None) -> bool:
        """Return whether two tensors (or the same rows of them) are equal; reads them in pieces of bounded size."""
        shape = self.info(one).shape
        if self.info(other).shape != shape:
            return False
        start, stop = rows or (0, shape[0])
        step = max(1, _READ_BYTES // max(1, math.prod(shape[1:]) * self.info(one).dtype.itemsize))
        pieces = [(first, min(first + step, stop)) for first in range(start, stop, step)]
        return all(torch.equal(self.read(one, piece), self.read(other, piece)) for piece in pieces)

    def descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[file]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class FolderTensor:
    """A tensor on disk (a :class:`~vapo_mcore.weights.rules.TensorSource`)."""

    folder: SafetensorsFolder
    name: str
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def read(self, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None) -> Tensor:
        shape = self.info.shape
        if not shape:
            assert (rows, columns) == (None, None)
            return self._read_rows(0, 1, ())
        start, stop = rows or (0, shape[0])
        assert 0 <= start <= stop <= shape[0], (self.name, rows)
        if columns is None or columns == (0, shape[1]):
            return self._read_rows(start, stop, shape[1:])
        # Columns are strided on disk: read whole rows in pieces of bounded size and keep the columns.
        first, last = columns
        assert 0 <= first <= last <= shape[1], (self.name, columns)
        result = torch.empty((stop - start, last - first, *shape[2:]), dtype=self.info.dtype)
        step = max(1, _READ_BYTES // max(1, math.prod(shape[1:]) * self.info.dtype.itemsize))
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            result[begin - start : end - start] = self._read_rows(begin, end, shape[1:])[:, first:last]
        return result

    def _read_rows(self, start: int, stop: int, row_shape: tuple[int, ...]) -> Tensor:
        shape = (stop - start, *row_shape) if self.info.shape else ()
        result = torch.empty(shape, dtype=self.info.dtype)
        row_bytes = math.prod(row_shape) * self.info.dtype.itemsize
        _read_exactly(self.folder, self.info, self.info.start + start * row_bytes, result)
        return result


def _read_exactly(folder: SafetensorsFolder, info: TensorInfo, offset: int, out: Tensor) -> None:
    if not out.numel():
        return
    view = memoryview(out.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    descriptor, done = folder.descriptor(info.file), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + (1 << 30)]], offset + done)
        if count == 0:
            raise CheckpointError(f"{info.file} was truncated while it was being read")
        done += count


def require_inside(folder: Path, file: Path) -> None:
    """Raise CheckpointError if ``file`` is a symbolic link out of its model folder.

    Links from a snapshot of a Hugging Face cache to its ``blobs`` are allowed.
    """
    if not file.is_symlink():
        return
    target, home = file.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs"
    if not (target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))):
        raise CheckpointError(f"{file} is a symbolic link to {target}, outside the model folder; replace the link by the file")
    if not target.is_file():
        raise CheckpointError(f"{file} is a symbolic link to {target}, which is not a file")


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"model folder {str(folder)!r} does not exist; give a Hugging Face model folder")
    for name in (INDEX_NAME, SINGLE_NAME):
        require_inside(folder, folder / name)
    if (folder / INDEX_NAME).exists() or (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds only pickled weights ({', '.join(pickled[:3])}), which are not loaded because a pickle can run code; "
            "convert the model to safetensors first (transformers: model.save_pretrained(folder))"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}")


def _read_index(path: Path) -> dict[str, str]:
    """Return ``weight_map`` of an index after checking that every file is a plain name inside the folder."""
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:  # invalid JSON, UTF-8 or contents
        raise CheckpointError(f"{path} is not a safetensors index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be a non-empty mapping of tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: tensor {name} points to {file!r}; only plain *.safetensors names inside the folder are allowed")
    return weight_map


def _compare_with_index(path: Path, index: dict[str, str], infos: dict[str, TensorInfo]) -> None:
    faults = [f"{name} is not in {file}" for name, file in index.items() if name not in infos or infos[name].file.name != file]
    faults += [f"{name} of {info.file.name} is not in the index" for name, info in infos.items() if name not in index]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(f"{path} does not match its files: {shown}")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file: an 8-byte little-endian header length, a JSON header, then the data without gaps."""
    try:
        size = file.stat().st_size
        stream = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    with stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is truncated or not a safetensors file ({size} bytes, declared header length {length})")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} has a malformed safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a malformed safetensors header: expected a mapping")
    infos = {name: _tensor_info(file, name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length
    for info in sorted(infos.values(), key=lambda info: (info.start, info.num_bytes)):
        if info.start != end:
            raise CheckpointError(f"{file} has a malformed safetensors header: its tensors overlap or leave gaps at byte {end}")
        end += info.num_bytes
    if end != size:
        raise CheckpointError(f"{file} has {size} bytes, its header describes {end}")
    return infos


def _tensor_info(file: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    try:
        kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        valid = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{file}: tensor {name} has a malformed header entry {entry!r}")
    if kind not in DTYPES:
        supported = ", ".join(DTYPES)
        raise CheckpointError(f"{file}: tensor {name} has dtype {kind}; supported: {supported} (dequantise the model first)")
    info = TensorInfo(file, DTYPES[kind], shape, data_start + start)
    if info.num_bytes != stop - start:
        raise CheckpointError(f"{file}: tensor {name} of shape {list(shape)} and dtype {kind} cannot occupy {stop - start} bytes")
    if data_start + stop > size:
        raise CheckpointError(f"{file} is truncated: it has {size} bytes, tensor {name} ends at byte {data_start + stop}")
    return info
