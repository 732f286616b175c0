"""Read and write Megatron-Core's distributed checkpoint format (``torch_dist``) tensor by tensor, without a process group.

A checkpoint is a folder with ``.metadata`` (location of each chunk of each global tensor), data files with chunks written by
``torch.save``, ``common.pt`` and ``metadata.json``. ``megatron.core.dist_checkpointing`` needs the whole model in memory; this module
writes each chunk immediately. Its checkpoints load with ``dist_checkpointing.load`` at any layout, and it reads what Megatron saves at
any layout.

``.metadata`` is a pickle. It is read by an unpickler restricted to the classes of this format, and the chunks with ``weights_only``, so
that an untrusted checkpoint cannot run code.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.reader import require_inside

METADATA_NAME, COMMON_NAME = ".metadata", "common.pt"
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_FILE_BYTES = 5_000_000_000

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "torch": "Size float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict defaultdict",
    "pathlib": "PosixPath PurePosixPath Path",
}
"""Module -> names that ``.metadata`` may refer to."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, "").split():
            return super().find_class(module, name)
        raise CheckpointError(f"the checkpoint's {METADATA_NAME} refers to {module}.{name}, which is not part of the format; not loaded")


class DistributedCheckpointWriter:
    """Writes chunks of global tensors into ``folder``, which must exist and be empty.

    Use as a context manager; leaving it without an error writes the metadata and completes the folder.

    ``expected_bytes``: approximate total size, reserved on disk file by file (raises OSError if it does not fit). ``rank``: rank of the
    writer, used in the names of its files when several write one folder.
    """

    def __init__(self, folder: str | Path, *, expected_bytes: int = 0, rank: int = 0) -> None:
        self.folder = Path(folder)
        self.rank = rank
        self._expected_bytes = expected_bytes
        self._stream: io.BufferedRandom | None = None
        self._file_name = ""
        self._files = 0
        self._tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}
        self._objects: list[str] = []
        self._places: list[tuple[str, tuple[int, ...] | None, str, int, int]] = []
        self._frames: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, bytes]] = {}

    def add(self, key: str, chunk: Tensor, global_shape: Sequence[int], offsets: Sequence[int]) -> None:
        """Write the chunk at ``offsets`` of the tensor ``key`` with ``global_shape``; adds leading axes of size one."""
        assert len(global_shape) == len(offsets) >= chunk.dim(), (key, global_shape, offsets, chunk.shape)
        value = chunk.detach().reshape((1,) * (len(global_shape) - chunk.dim()) + tuple(chunk.shape)).contiguous()
        known = self._tensors.setdefault(key, (value.dtype, tuple(global_shape), []))
        assert known[:2] == (value.dtype, tuple(global_shape)), f"{key}: chunks disagree about the tensor"
        known[2].append((tuple(offsets), tuple(value.shape)))
        self._store(key, tuple(offsets), lambda stream: self._save(value, stream))

    def add_object(self, key: str, value: Any, offset: Sequence[int], global_shape: Sequence[int]) -> None:
        """Write one shard of a Megatron ``ShardedObject``, for example a module's ``_extra_state``."""
        name = f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, global_shape))}"
        self._objects.append(name)
        content = _archive_of_none() if value is None else _archive(value)
        self._store(name, None, lambda stream: stream.write(content))

    def _save(self, value: Tensor, stream: io.BufferedRandom) -> None:
        """Write what ``torch.save`` would, reusing the archive's framing, which is equal for tensors of the same dtype and shape."""
        frame = self._frames.get((value.dtype, tuple(value.shape)))
        if frame is None:
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # torch.save would store the whole storage of a view
            start = stream.tell()
            _torch_save(value, stream)
            self._frames[value.dtype, tuple(value.shape)] = _frame(stream, start, value.nbytes)
        else:
            stream.write(frame[0])
            stream.write(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            stream.write(frame[1])

    def _store(self, key: str, offsets: tuple[int, ...] | None, save: Callable[[io.BufferedRandom], object]) -> None:
        if self._stream is None or self._stream.tell() > _FILE_BYTES:
            self._next_file()
        assert self._stream is not None
        start = self._stream.tell()
        save(self._stream)
        self._places.append((key, offsets, self._file_name, start, self._stream.tell() - start))

    def _next_file(self) -> None:
        self._close_file()
        self._file_name = f"__{self.rank}_{self._files}.distcp"
        self._files += 1
        self._stream = self.open(self._file_name)
        reserved = min(self._expected_bytes, _FILE_BYTES)
        if reserved:
            os.posix_fallocate(self._stream.fileno(), 0, reserved)
        self._expected_bytes -= reserved

    def open(self, name: str) -> Any:
        """Create a file in the folder for binary reading and writing."""
        return (self.folder / name).open("x+b")

    def part(self) -> WrittenPart:
        """Return the locations of everything written, for :func:`write_metadata`."""
        return WrittenPart(self._tensors, self._objects, self._places)

    def _close_file(self) -> None:
        if self._stream is not None:
            self._stream.truncate()  # free unused reserved space
            self._stream.close()
            self._stream = None

    def _finish(self) -> None:
        (self.folder / COMMON_NAME).write_bytes(common_file({}))
        (self.folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")
        write_metadata(self.folder, [self.part()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close_file()
        if kind is None:
            self._finish()


class WrittenPart(NamedTuple):
    """The chunks and objects written by one rank.

    ``tensors``: key -> (dtype, global shape, (offsets, sizes) of its chunks); ``objects``: names; ``places``: (key, offsets or None,
    file, first byte, number of bytes) of each chunk and object.
    """

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]]
    objects: list[str]
    places: list[tuple[str, tuple[int, ...] | None, str, int, int]]


def write_metadata(folder: Path, parts: Sequence[WrittenPart]) -> None:
    """Write ``.metadata`` for the chunks that the ranks have written, given by ``parts``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}
    for part in parts:
        for key, (dtype, shape, chunks) in part.tensors.items():
            known = tensors.setdefault(key, (dtype, shape, []))
            assert known[:2] == (dtype, shape), f"{key}: the ranks disagree about the tensor"
            known[2].extend(chunks)
    state: dict[str, Any] = {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(shape),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
        )
        for key, (dtype, shape, chunks) in tensors.items()
    }
    state.update({name: BytesStorageMetadata() for part in parts for name in part.objects})
    storage = {
        MetadataIndex(key, None if offsets is None else torch.Size(offsets)): _StorageInfo(file, start, length)
        for part in parts
        for key, offsets, file, start, length in part.places
    }
    with (folder / METADATA_NAME).open("xb") as stream:
        pickle.dump(Metadata(state_dict_metadata=state, storage_data=storage), stream)


class _Output:
    """Stream for ``torch.save`` that keeps the OSError of a failed write, which ``torch.save`` replaces by a RuntimeError."""

    def __init__(self, stream: io.BytesIO | io.BufferedRandom) -> None:
        self.flush = stream.flush
        self.error: OSError | None = None
        self._write = stream.write

    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except OSError as error:
            self.error = error
            raise


def _torch_save(value: Any, stream: io.BytesIO | io.BufferedRandom) -> None:
    """Call ``torch.save`` without CRC-32, which nothing reads and which halves the speed; conversions store their own checksums.

    Raises OSError if the disk is full.
    """
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    output = _Output(stream)
    try:
        torch.save(value, output)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise output.error or error from None
    finally:
        torch.serialization.set_crc32_options(crc32)


def common_file(state: dict[str, Any]) -> bytes:
    """Return the contents of ``common.pt``. On a full disk ``torch.save`` to a path would raise a RuntimeError that hides the reason."""
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def _archive(value: Any) -> bytes:
    content = io.BytesIO()
    _torch_save([value], content)  # Megatron stores a list of the shards with one name
    return content.getvalue()


@cache
def _archive_of_none() -> bytes:
    """Return the archive of None, cached: most sharded objects are None, and a mixture of experts has thousands."""
    return _archive(None)


def _frame(stream: io.BufferedRandom, start: int, num_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` wrote from ``start`` on, before and after the ``num_bytes`` of its single tensor."""
    end = stream.tell()
    with ZipFile(_Window(stream, start, end - start)) as archive:  # type: ignore[arg-type]
        (data,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    stream.seek(start + data.header_offset + 26)  # in the local file header: lengths of the name and extra field that follow it
    name_length, extra_length = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    first = data.header_offset + 30 + name_length + extra_length
    assert (data.file_size, data.compress_type) == (num_bytes, ZIP_STORED)
    stream.seek(start)
    before = stream.read(first)
    stream.seek(start + first + num_bytes)
    after = stream.read(end - stream.tell())
    return before, after


class DistributedCheckpointReader:
    """Reads regions of the global tensors of a distributed checkpoint.

    Raises CheckpointError if the folder is not such a checkpoint, is damaged, or refers to files outside the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            backend = json.loads((self.folder / "metadata.json").read_text(encoding="utf-8"))["sharded_backend"]
            with (self.folder / METADATA_NAME).open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
            entries, storage = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.folder} is not a Megatron distributed checkpoint, or is damaged: {error!r}") from error
        if backend != "torch_dist":
            raise CheckpointError(f"{self.folder} has the format {backend!r}; only 'torch_dist' is supported")
        self._entries = {key: entry for key, entry in entries.items() if hasattr(entry, "chunks")}
        self.objects = {key for key in entries if key not in self._entries}
        """Names of the sharded objects."""
        self._sizes = {key: {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks} for key, entry in self._entries.items()}
        self._places = {(index.fqn, None if index.offset is None else tuple(index.offset)): info for index, info in storage.items()}
        self._check_files()

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for (key, _), info in self._places.items():
            name = info.relative_path
            if not isinstance(name, str) or "/" in name or "\\" in name:
                raise CheckpointError(f"{self.folder}: {key} points to {name!r}; only plain file names inside the folder are allowed")
            if name not in sizes:
                file = self.folder / name
                require_inside(self.folder, file)
                sizes[name] = file.stat().st_size if file.is_file() else -1
            if sizes[name] < info.offset + info.length:
                fault = "does not exist" if sizes[name] < 0 else f"is truncated: it has {sizes[name]} bytes"
                raise CheckpointError(f"{self.folder / name} {fault}; {key} ends at byte {info.offset + info.length}")

    @property
    def keys(self) -> list[str]:
        return list(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._entries[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._entries[key].properties.dtype

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(self.shape(key)).numel() * self.dtype(key).itemsize for key in self._entries)

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read the region of ``key`` with ``sizes`` at ``offsets``; does not copy if one chunk contains it."""
        chunks = self._sizes[key]
        if chunks.get(tuple(offsets)) == tuple(sizes):  # fast path for checkpoints of the converter; a large model has thousands
            return self._chunk(key, tuple(offsets), tuple(sizes))
        result: Tensor | None = None
        filled = 0
        for chunk_offsets, chunk_sizes in chunks.items():
            overlap = _overlap(offsets, sizes, chunk_offsets, chunk_sizes)
            if overlap is None:
                continue
            there, here = overlap
            part = self._chunk(key, chunk_offsets, chunk_sizes)[there]
            if part.shape == torch.Size(sizes):
                return part
            if result is None:
                result = torch.empty(tuple(sizes), dtype=self.dtype(key))
            result[here] = part
            filled += part.numel()
        if result is None or filled != result.numel():
            raise CheckpointError(f"{self.folder}: {key} is incomplete at offset {list(offsets)}, size {list(sizes)}")
        return result

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        info = self._places.get((key, offsets))
        if info is None:
            raise CheckpointError(f"{self.folder}: the chunk of {key} at {list(offsets)} is not stored")
        value = self._load(key, info)
        if not isinstance(value, Tensor) or tuple(value.shape) != sizes:
            raise CheckpointError(f"{self.folder / info.relative_path}: the chunk of {key} is not a tensor of shape {list(sizes)}")
        return value

    def read_object(self, name: str) -> Any:
        """Read a sharded object of plain values and tensors. Raises CheckpointError for anything else."""
        info = self._places.get((name, None))
        if info is None:
            raise CheckpointError(f"{self.folder}: {name} is not stored")
        value = self._load(name, info)
        if not isinstance(value, list) or len(value) != 1:
            raise CheckpointError(f"{self.folder / info.relative_path}: {name} does not have Megatron's format of a sharded object")
        return value[0]

    def _load(self, key: str, info: Any) -> Any:
        with (self.folder / info.relative_path).open("rb") as stream:
            try:
                return torch.load(_Window(stream, info.offset, info.length), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
            except (RuntimeError, ValueError, AttributeError, pickle.UnpicklingError, EOFError) as error:
                raise CheckpointError(f"{self.folder / info.relative_path}: {key} is damaged or not allowed: {error}") from error


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], chunk_offsets: Sequence[int], chunk_sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the slices of the overlap within the chunk and within the region; None without overlap."""
    there, here = [], []
    for start, size, chunk_start, chunk_size in zip(offsets, sizes, chunk_offsets, chunk_sizes, strict=True):
        first, last = max(start, chunk_start), min(start + size, chunk_start + chunk_size)
        if first >= last:
            return None
        there.append(slice(first - chunk_start, last - chunk_start))
        here.append(slice(first - start, last - start))
    return tuple(there), tuple(here)


class _Window(io.RawIOBase):
    """A seekable read-only view of ``length`` bytes of a file."""

    def __init__(self, stream: io.BufferedReader | io.BufferedRandom, start: int, length: int) -> None:
        self._stream, self._start, self._length = stream, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._stream.seek(self._start + self._position)
        done = self._stream.readinto(view[:count])
        self._position += done
        return done
