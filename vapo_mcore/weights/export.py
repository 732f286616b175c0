"""Export Megatron weights as Hugging Face tensors: a collective generator of buckets, used for weight sync and saving.

For each bucket the shards are first broadcast over the pipeline (one broadcast per owning stage, 1/TP of the bytes) and then gathered
over tensor parallelism, so that a bucket takes a few large transfers regardless of its number of tensors. A tensor group larger than a
bucket, such as the embedding of a large model, is exported the same way in blocks of rows. Of a mixture, the stage that owns a layer first
broadcasts each expert from the expert-parallel rank that holds it, one broadcast per rank; experts and the rest are in separate buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vapo_mcore import heartbeat
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.families import HEAD_PREFIX
from vapo_mcore.weights.loader import ParallelLayout, expert_offset, held_by_stage
from vapo_mcore.weights.plan import MappedTensor, Role, global_parameters, match_parameters, plan_mapping, require_complete
from vapo_mcore.weights.writer import (
    CHECKSUMS_NAME,
    DEFAULT_MAX_SHARD_BYTES,
    SafetensorsWriter,
    companion_files,
    copy_companions,
    new_folder,
    write_json,
)

DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class _Item:
    """A plan entry with its manifest data: the pipeline rank that holds it, its dtype, and its shape on a TP rank.

    ``expert_owner``: the expert-parallel rank that holds an expert (None: not an expert, or no expert parallelism).
    """

    index: int
    entry: MappedTensor
    owner: int
    dtype: torch.dtype
    shard_shape: tuple[int, ...]
    expert_owner: int | None = None

    @property
    def shard_numel(self) -> int:
        return math.prod(self.shard_shape)


class Exporter:
    """Exports the weights of one model repeatedly; the ranks exchange the manifest once, on construction.

    Collective over tensor and pipeline parallelism, and of a mixture over expert parallelism: all these ranks must construct it and
    iterate :meth:`buckets` together.
    ``chunks`` are this rank's unwrapped GPTModel chunks; each export reads the current parameters.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        architecture: ModelArchitecture,
        parallel: ParallelLayout,
        *,
        role: Role,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.architecture, self.parallel, self.role = architecture, parallel, role
        self.plan = plan_mapping(architecture, role)
        self._parameters = {
            index: parameter
            for index, parameter in match_parameters(
                self.plan, global_parameters(chunks, expert_offset=expert_offset(architecture, parallel))
            ).items()
            if not self.plan[index].tied_copy
        }
        self._items = self._exchange_manifest()
        # Peak memory: a bucket's shards, their gathered copies, the merged tensors, and one group being split.
        self._limit = bucket_bytes / (3 + 1 / parallel.tensor_model_parallel_size)
        self._buckets = list(self._group())

    @property
    def names(self) -> list[str]:
        """HF names in the order of export."""
        return [name for item in self._items for name in item.entry.hf_names]

    @property
    def manifest(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """HF name -> (shape, dtype) of all exported tensors, in order."""
        return {
            name: (shape, item.dtype) for item in self._items for name, shape in zip(item.entry.hf_names, item.entry.hf_shapes, strict=True)
        }

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield full HF tensors on every rank, in the dtypes of the parameters, one bucket at a time.

        Temporary memory, including the bucket, is at most ``bucket_bytes``. A larger tensor group (gate and up; q, k and v) gets a separate
        bucket and takes up to ``bucket_bytes`` in addition to its full tensors. Tensors may share memory with the parameters: do not
        modify them, and drop all references before the next bucket.
        """
        for items in self._buckets:  # not under no_grad: its generator wrapper would keep a bucket alive while the next is built
            bucket = self._export_in_pieces(items[0]) if self._needs_pieces(items[0]) else self._export(items)
            yield bucket
            del bucket

    def _degree(self, item: _Item) -> int:
        """Return the number of ranks that a parameter is sharded over."""
        if not item.entry.functions.sharded:
            return 1
        return self.parallel.expert_tensor_parallel_size if item.entry.is_expert else self.parallel.tensor_model_parallel_size

    def _tensor_group(self, item: _Item) -> dist.ProcessGroup:
        """Return the ranks that a parameter is sharded over, as a group."""
        return self.parallel.expert_tensor_parallel_group if item.entry.is_expert else self.parallel.tensor_model_parallel_group

    def _needs_pieces(self, item: _Item) -> bool:
        degree = self._degree(item)
        is_communicated = degree > 1 or self.parallel.pipeline_model_parallel_size > 1 or item.expert_owner is not None
        return is_communicated and item.shard_numel * item.dtype.itemsize * degree > self._limit

    @torch.no_grad()
    def _export_in_pieces(self, item: _Item) -> list[tuple[str, Tensor]]:
        """Export the HF tensors of one parameter, one range of rows at a time."""
        device = self._device
        tensors = [torch.empty(shape, dtype=item.dtype, device=device) for shape in item.entry.hf_shapes]
        rows, degree = item.shard_shape[0], self._degree(item)
        sources = None if item.entry.functions.cuts_columns else self._row_sources(item, degree, device)
        index_bytes = 0 if sources is None else 5 * 8 * degree * rows  # row indices and their comparisons
        row_bytes = item.shard_numel // rows * item.dtype.itemsize * degree
        step = max(1, int((self._limit - index_bytes / 3) // row_bytes))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            blocks = self._gather_piece(item, self._piece(item, start, stop), degree)
            if sources is None:
                (only,) = tensors
                only[start:stop] = item.entry.functions.unshard(list(blocks), self.architecture)
                continue
            for tensor, (rank, row) in zip(tensors, sources, strict=True):
                (here,) = torch.where((row >= start) & (row < stop))
                tensor.index_copy_(0, here, blocks.flatten(0, 1).index_select(0, rank[here] * (stop - start) + row[here] - start))
        return list(zip(item.entry.hf_names, tensors, strict=True))

    def _row_sources(self, item: _Item, degree: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return for each HF tensor of a parameter the source TP rank and shard row of each row, by applying the rule to row indices."""
        rows, kind = item.shard_shape[0], item.entry.functions
        numbers = torch.arange(degree * rows, device=device).view(degree, rows)
        return [(part // rows, part % rows) for part in kind.split(kind.unshard(list(numbers), self.architecture), self.architecture)]

    def _piece(self, item: _Item, start: int, stop: int) -> Tensor:
        """Broadcast a range of rows of this TP rank's shard to all pipeline stages."""
        rank, size = self.parallel.pipeline_model_parallel_rank, self.parallel.pipeline_model_parallel_size
        if item.index in self._parameters:
            piece = self._shard(item).view(item.shard_shape)[start:stop]
        else:
            piece = torch.empty((stop - start, *item.shard_shape[1:]), dtype=item.dtype, device=self._device)
        if item.owner == rank and item.expert_owner is not None:
            group = self.parallel.expert_model_parallel_group
            dist.broadcast(piece.view(-1).view(torch.uint8), group=group, group_src=item.expert_owner)
        if size > 1:
            dist.broadcast(piece.view(-1).view(torch.uint8), group=self.parallel.pipeline_model_parallel_group, group_src=item.owner)
        return piece

    def _gather_piece(self, item: _Item, piece: Tensor, degree: int) -> Tensor:
        """Gather the rows of all TP ranks, [TP, rows, ...]."""
        if degree == 1:
            return piece[None]
        gathered = piece.new_empty((degree, *piece.shape))
        dist.all_gather_into_tensor(gathered.view(-1).view(torch.uint8), piece.view(-1).view(torch.uint8), group=self._tensor_group(item))
        return gathered

    @torch.no_grad()
    def _export(self, items: Sequence[_Item]) -> list[tuple[str, Tensor]]:
        heartbeat.alive()
        shards = self._on_all_stages(items)
        gathered = self._gather_shards(items, shards)
        named: list[tuple[str, Tensor]] = []
        for item, shard in zip(items, shards, strict=True):
            kind = item.entry.functions
            blocks = next(gathered) if self._degree(item) > 1 else shard[None]  # [TP, flat shard], one row if replicated
            if kind.row_blocks and blocks.is_contiguous():  # a bucket of one tensor: rank order is row order, nothing to copy
                full = blocks.view(-1, *item.shard_shape[1:])
            else:
                full = kind.unshard([block.view(item.shard_shape) for block in blocks], self.architecture)
            named += zip(item.entry.hf_names, kind.split(full, self.architecture), strict=True)
        return named

    def _on_all_stages(self, items: Sequence[_Item]) -> list[Tensor]:
        """Return this TP rank's flat shard of every item: the parameters without pipeline parallelism, else received copies."""
        rank, size = self.parallel.pipeline_model_parallel_rank, self.parallel.pipeline_model_parallel_size
        if size == 1:
            return self._on_stage(items)
        shards: list[Tensor] = [torch.empty(0)] * len(items)
        by_owner = sorted(range(len(items)), key=lambda position: items[position].owner)
        for owner, group in groupby(by_owner, key=lambda position: items[position].owner):
            positions = list(group)
            sizes = [items[position].shard_numel for position in positions]
            if owner == rank:
                flat = torch.cat(self._on_stage([items[position] for position in positions]))
            else:
                flat = torch.empty(sum(sizes), dtype=items[0].dtype, device=self._device)
            dist.broadcast(flat.view(torch.uint8), group=self.parallel.pipeline_model_parallel_group, group_src=owner)
            for position, shard in zip(positions, flat.split(sizes), strict=True):
                shards[position] = shard
        return shards

    def _on_stage(self, items: Sequence[_Item]) -> list[Tensor]:
        """Return the flat shard of every item of this rank's stage: the parameters, and copies of other expert-parallel ranks' experts."""
        if items[0].expert_owner is None:  # a bucket is all experts or none
            return [self._shard(item) for item in items]
        parallel, shards = self.parallel, [torch.empty(0)] * len(items)
        for owner in range(parallel.expert_model_parallel_size):
            positions = [position for position, item in enumerate(items) if item.expert_owner == owner]
            if not positions:
                continue
            sizes = [items[position].shard_numel for position in positions]
            if owner == parallel.expert_model_parallel_rank:
                flat = torch.cat([self._shard(items[position]) for position in positions])
            else:
                flat = torch.empty(sum(sizes), dtype=items[0].dtype, device=self._device)
            dist.broadcast(flat.view(torch.uint8), group=parallel.expert_model_parallel_group, group_src=owner)
            for position, shard in zip(positions, flat.split(sizes), strict=True):
                shards[position] = shard
        return shards

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _shard(self, item: _Item) -> Tensor:
        parameter = self._parameters[item.index].detach()
        assert tuple(parameter.shape) == item.shard_shape, (
            f"{item.entry.mcore_name} is {tuple(parameter.shape)}: are the weights offloaded?"
        )
        return parameter.reshape(-1)

    def _gather_shards(self, items: Sequence[_Item], shards: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield for each sharded item the blocks of all TP ranks, [TP, flat shard], using one collective for all items."""
        split = [position for position, item in enumerate(items) if self._degree(item) > 1]
        if not split:
            return
        local = torch.cat([shards[position] for position in split])
        gathered = local.new_empty((self._degree(items[split[0]]), local.numel()))
        group = self._tensor_group(items[split[0]])
        dist.all_gather_into_tensor(gathered.view(-1).view(torch.uint8), local.view(torch.uint8), group=group)
        sizes = [shards[position].numel() for position in split]
        del local
        yield from gathered.split(sizes, dim=1)

    def _exchange_manifest(self) -> list[_Item]:
        held = [(index, parameter.dtype) for index, parameter in self._parameters.items()]
        stages = held_by_stage(held, self.architecture, self.parallel)
        owners = {index: (stage, dtype) for stage, tensors in enumerate(stages) for index, dtype in tensors}
        require_complete(self.plan, owners)
        tp, experts = self.parallel.tensor_model_parallel_size, self.architecture.num_experts
        result = []
        for index, entry in enumerate(self.plan):
            if entry.tied_copy:
                continue
            degree, expert_owner = tp, None
            if entry.expert is not None:
                assert experts is not None
                degree, ranks = self.parallel.expert_tensor_parallel_size, self.parallel.expert_model_parallel_size
                expert_owner = entry.expert // (experts // ranks) if ranks > 1 else None
            result.append(_Item(index, entry, *owners[index], entry.shard_shape(degree, self.architecture), expert_owner))
        return result

    def _group(self) -> Iterator[list[_Item]]:
        """Group consecutive items of one dtype, experts apart, into buckets within the limit of gathered bytes, at least one item each."""
        bucket: list[_Item] = []
        size = 0
        for item in self._items:
            item_bytes = item.shard_numel * item.dtype.itemsize * self._degree(item)
            kind, previous = (item.dtype, item.entry.is_expert), bucket[0] if bucket else item
            if bucket and (size + item_bytes > self._limit or kind != (previous.dtype, previous.entry.is_expert)):
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += item_bytes
        if bucket:
            yield bucket


def save_hf(
    exporter: Exporter,
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> None:
    """Write the model as a Hugging Face folder. A collective over all ranks; rank 0 writes.

    ``source``: the folder the model was loaded from, for config and tokenizer; ``checksums.json`` is added. ``dtype``: dtype of the
    weights on disk, None: that of the parameters (a critic's head stays in float32). ``destination`` is published by a rename at the end.
    A CheckpointError of the writer (destination exists, disk full) is raised on every rank.
    """
    failure: list[CheckpointError | None] = [None]
    parallel = exporter.parallel
    if dist.get_rank() == 0:
        buckets = exporter.buckets()
        try:
            _write_hf(exporter, buckets, Path(source), Path(destination), dtype, max_shard_bytes)
        except CheckpointError as error:
            failure[0] = error
            for _ in buckets:  # finish the collective that the other ranks are in before broadcasting the error
                pass
    elif exporter.architecture.is_moe or (parallel.data_parallel_rank == 0 and parallel.context_parallel_rank == 0):
        for _ in exporter.buckets():
            pass
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def _write_hf(
    exporter: Exporter,
    buckets: Iterator[list[tuple[str, Tensor]]],
    source: Path,
    destination: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    manifest = {name: (shape, _stored_type(name, kept, dtype)) for name, (shape, kept) in exporter.manifest.items()}
    trunk_dtype = next(iter(manifest.values()))[1]
    checksums: dict[str, str] = {}
    with new_folder(destination) as folder:
        companion_files(source)
        with SafetensorsWriter(folder, manifest, max_shard_bytes=max_shard_bytes) as writer:
            for bucket in buckets:
                for name, tensor in bucket:
                    stored = tensor.to(manifest[name][1])
                    checksums[name] = tensor_checksum(stored)
                    writer.write(name, stored)
                del bucket, tensor, stored  # before the next bucket is built
        copy_companions(source, folder, exporter.architecture, role=exporter.role, dtype=trunk_dtype)
        write_json(folder / CHECKSUMS_NAME, checksums)


def _stored_type(name: str, kept: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return kept if wanted is None or name.startswith(HEAD_PREFIX) else wanted
