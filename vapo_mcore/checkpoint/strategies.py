"""Save and load strategies for ``megatron.core.dist_checkpointing``.

Saving copies this rank's shards into host buffers, which are allocated once and reused, and a thread writes them. (Megatron's
asynchronous writer forks processes and starts a server, which is unsafe in a process with CUDA, vLLM and threads.) Loading reads metadata
with an unpickler restricted to the format's classes and everything else with ``weights_only``, so nothing in a checkpoint is executed.
The files have the ``torch_dist`` format and can be read by Megatron's own loader.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo_mcore import heartbeat
from vapo_mcore.checkpoint.dist_checkpointing import AsyncSaveShardedStrategy, LoadShardedStrategy, TorchCommonLoadStrategy
from vapo_mcore.collectives import all_gather_objects, fail_together, world
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.host import HAS_CUDA, import_megatron
from vapo_mcore.megatron.offload import HostPool
from vapo_mcore.weights.distcp import COMMON_NAME, DistributedCheckpointReader, DistributedCheckpointWriter, WrittenPart, write_metadata

import_megatron()
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402

_ALIGNMENT = 64
EXTRA_STATE = "_extra_state"
"""Part of the keys of Transformer Engine's extra state, which is empty without fp8 and absent without Transformer Engine."""


class HashingFile(io.RawIOBase):
    """A new append-only file that computes the SHA-256 of its contents and is fsynced on close. Readable at any position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = hashlib.sha256()
        self._position = 0
        self.size = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        done = os.preadv(self._descriptor, [buffer], self._position)
        self._position += done
        return done

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        assert self._position == self.size, "the file is append-only"
        self._append(view)
        self._digest.update(view)
        self.size += len(view)
        self._position = self.size
        return len(view)

    def _append(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self.size + done)

    def truncate(self, size: int | None = None) -> int:
        assert size is None, "the file is append-only"
        return self.size

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        if not self.closed:
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
                super().close()


class _RankWriter(DistributedCheckpointWriter):
    """Writes one rank's chunks into that rank's files; rank 0 writes the metadata for all ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank=rank)
        self.files: dict[str, HashingFile] = {}

    def open(self, name: str) -> Any:
        self.files[name] = HashingFile(self.folder / name)
        return self.files[name]

    def _finish(self) -> None:
        """Do nothing here: ``_complete`` writes the metadata of all ranks later."""


class SnapshotSave(AsyncSaveShardedStrategy):
    """Snapshot strategy: ``async_save`` returns once this rank's shards are copied into host buffers; a thread writes them later.

    Args:
        pool, owner: pool of host buffers, and the name the copies are allocated under. All saves of an owner reuse the same memory, so
            the previous one must have finished before the next begins.

    Raises CheckpointError on all ranks if one of them has no host memory for the copy. ``num_bytes``: bytes that this rank writes in
    the latest save; ``written``: its files (name -> size, SHA-256) after it is written.
    """

    can_handle_sharded_objects = True  # type: ignore[assignment]

    def __init__(self, pool: HostPool, owner: str) -> None:
        super().__init__("torch_dist", 1)
        self.pool = pool
        self.owner = owner
        self.num_bytes = 0
        self.written: dict[str, tuple[int, str]] = {}

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, _async_strategy: str = "") -> AsyncRequest:
        folder = Path(checkpoint_dir)
        objects: list[tuple[str, Any, tuple[int, ...], tuple[int, ...]]] = []
        shards: list[ShardedTensor] = []
        for item in nested_values(sharded_state_dict):
            if not is_main_replica(item.replica_id):
                continue
            if isinstance(item, ShardedObject):
                objects.append((item.key, item.data, tuple(item.global_offset), tuple(item.global_shape)))
            else:
                assert isinstance(item, ShardedTensor) and item.data is not None, item
                shards.append(item)
        with fail_together():
            snapshots = self._copy([shard.data.detach() for shard in shards])
        copied = zip(shards, snapshots, strict=True)
        tensors = [(shard.key, snapshot, tuple(shard.global_shape), tuple(shard.global_offset)) for shard, snapshot in copied]
        writer: list[_RankWriter] = []

        def write() -> None:
            out = _RankWriter(folder, world()[0])
            writer.append(out)
            with out:
                for key, tensor, shape, offsets in tensors:
                    out.add(key, tensor, shape, offsets)
                    if heartbeat.CURRENT.phase == "checkpoint":  # training waits for this
                        heartbeat.alive()
                for key, value, offset, shape in objects:
                    out.add_object(key, value, offset, shape)

        def finish() -> None:
            parts = all_gather_objects(writer[0].part())
            with fail_together():
                if world()[0] == 0:
                    _complete(folder, parts)
            self.written = {name: (file.size, file.sha256) for name, file in writer[0].files.items()}

        return AsyncRequest(write, (), [finish])

    def _copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors consecutively into the owner's buffer."""
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)
        ends = list(itertools.accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors))
        try:
            arena = self.pool.arena(self.owner, ends[-1] if ends else 0)
        except MemoryError as error:
            gib = (ends[-1] if ends else 0) / 2**30
            raise CheckpointError(
                f"no host memory for the {gib:.2f} GiB copy of {self.owner} on rank {world()[0]}: {error}; nothing was written"
            ) from error
        snapshots = []
        for tensor, start in zip(tensors, [0, *ends], strict=False):
            snapshot = arena[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            snapshots.append(snapshot.copy_(tensor, non_blocking=True))
        if HAS_CUDA:
            torch.cuda.synchronize()
        return snapshots


def _complete(folder: Path, parts: list[WrittenPart]) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    try:
        write_metadata(folder, parts)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror}") from error


class SafeLoad(LoadShardedStrategy):
    """Load strategy that reads the regions requested by this rank. Raises CheckpointError for missing or damaged data."""

    can_handle_sharded_objects = True  # type: ignore[assignment]

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != "torch_dist":
            raise CheckpointError(f"the checkpoint has the format {loaded_backend!r}; only 'torch_dist' is supported")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != 1:
            raise CheckpointError(f"the checkpoint's format has version {loaded_version}; only 1 is supported")

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        reader = DistributedCheckpointReader(checkpoint_dir)

        def read(item: Any) -> Any:
            heartbeat.alive()
            if isinstance(item, ShardedObject):
                return None if EXTRA_STATE in item.key and item.unique_key not in reader.objects else reader.read_object(item.unique_key)
            return _read_tensor(reader, item)

        return dict_list_map_outplace(read, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        reader = DistributedCheckpointReader(checkpoint_dir)
        empty: Callable[[str], Tensor] = lambda key: torch.empty(reader.shape(key), dtype=reader.dtype(key), device="meta")  # noqa: E731
        return {key: ShardedTensor.from_rank_offsets(key, empty(key)).without_data() for key in reader.keys}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        reader = DistributedCheckpointReader(checkpoint_dir)
        objects = {name: ShardedObject.empty_from_unique_key(name) for name in reader.objects}
        return objects | self.load_tensors_metadata(checkpoint_dir)


def _read_tensor(reader: DistributedCheckpointReader, item: ShardedTensor) -> Tensor:
    """Read the region of ``item``. Vocabulary padding rows that the stored layout lacks are read as zeros."""
    sizes = (1,) * item.prepend_axis_num + tuple(item.local_shape)
    if item.key not in reader:
        raise CheckpointError(f"{reader.folder}: {item.key} is missing")
    stored = reader.shape(item.key)
    if stored == tuple(item.global_shape):
        return reader.read(item.key, item.global_offset, sizes).reshape(item.local_shape)
    if not item.allow_shape_mismatch or stored[1:] != tuple(item.global_shape[1:]):
        raise CheckpointError(f"{reader.folder}: {item.key} has shape {list(stored)}, the model's has {list(item.global_shape)}")
    result = torch.zeros(sizes, dtype=reader.dtype(item.key))
    rows = min(sizes[0], stored[0] - item.global_offset[0])
    if rows > 0:
        result[:rows] = reader.read(item.key, item.global_offset, (rows, *sizes[1:]))
    return result.reshape(item.local_shape)


class SafeCommonLoad(TorchCommonLoadStrategy):
    """Loads ``common.pt`` with ``weights_only=True``, regardless of environment variables."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        path = Path(checkpoint_dir) / COMMON_NAME
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read without executing code from it, or is damaged: {error}") from error
