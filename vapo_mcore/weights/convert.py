"""Offline conversion between Hugging Face folders and Megatron's distributed checkpoints, one tensor at a time on the CPU.

The Megatron folders are ``torch_dist`` checkpoints that load at any TP/PP/EP. Each has a subfolder ``hf`` (config, tokenizer, ...), so
that it can be converted back without the original, and ``checksums.json`` with the checksum of every HF tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.distcp import DistributedCheckpointWriter
from vapo_mcore.weights.families import HEAD_PREFIX
from vapo_mcore.weights.plan import MappedTensor, Role, hf_manifest
from vapo_mcore.weights.read_ahead import read_ahead
from vapo_mcore.weights.views import HF_SUBFOLDER, HfFolderView, HfView, MegatronFolderView, open_view, placements, require_finite
from vapo_mcore.weights.writer import (
    CHECKSUMS_NAME,
    DEFAULT_MAX_SHARD_BYTES,
    SafetensorsWriter,
    companion_files,
    copy_companions,
    new_folder,
    refuse_existing,
    require_space,
    write_json,
)

DEFAULT_VOCAB_MULTIPLE = 128
"""Megatron-LM's default of ``--make-vocab-size-divisible-by``."""

_EXTRA_STATES = (
    "self_attention.core_attention",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True)
class ConversionReport:
    """Result of a conversion: number and bytes of HF tensors written, and the skipped tensors of the source with the reason."""

    tensors: int
    num_bytes: int
    role: Role
    dropped: dict[str, str]


def hf_to_megatron(
    source: str | Path,
    destination: str | Path,
    *,
    role: Role | None = None,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = DEFAULT_VOCAB_MULTIPLE,
) -> ConversionReport:
    """Convert a HF folder to a distributed checkpoint. Pads the vocabulary with zero rows to a multiple of ``vocab_multiple``.

    Peak memory is about one tensor group. ``destination`` is published by a rename at the end. Raises CheckpointError for an invalid
    source (see :class:`HfFolderView`), an existing destination and a full disk.
    """
    refuse_existing(destination)
    with open_view(source, role=role) as view, new_folder(destination) as folder:
        if not isinstance(view, HfFolderView):
            raise CheckpointError(f"{source} is already a Megatron checkpoint; hf-to-megatron takes a Hugging Face folder")
        companion_files(view.companions)
        kept = {name: stored_dtype(view.dtype(name), name, dtype) for entry in view.plan for name in entry.hf_names}
        size = sum(math.prod(shape) * kept[name].itemsize for name, shape in hf_manifest(view.plan).items())
        require_space(folder, size)
        checksums = _Checksums()
        with DistributedCheckpointWriter(folder, expected_bytes=size) as out, read_ahead(view) as tensors:
            for entry in view.plan:
                _write_entry(out, view, entry, islice(tensors, len(entry.hf_names)), dtype, vocab_multiple, checksums)
            _write_extra_states(out, view.architecture)
        (folder / HF_SUBFOLDER).mkdir()
        copy_companions(view.companions, folder / HF_SUBFOLDER, view.architecture, role=view.role, dtype=next(iter(kept.values())))
        write_json(folder / CHECKSUMS_NAME, checksums.by_name)
        return ConversionReport(len(kept), checksums.num_bytes, view.role, view.dropped)


def stored_dtype(source: torch.dtype, name: str, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype to store a HF tensor in; a scalar head keeps its own, since it is tiny and trained in float32."""
    return source if wanted is None or name.startswith(HEAD_PREFIX) else wanted


def _write_entry(
    out: DistributedCheckpointWriter,
    view: HfView,
    entry: MappedTensor,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    vocab_multiple: int,
    checksums: _Checksums,
) -> None:
    """Write the chunks as Megatron splits them: gate and up separately, padding rows separately; q, k and v fused."""
    arch = view.architecture
    place = placements(entry, arch)[0]
    rank = len(entry.hf_shapes[0])
    rows = sum(shape[0] for shape in entry.hf_shapes)
    padded = -(-rows // vocab_multiple) * vocab_multiple if entry.kind == "vocab" else rows
    shape = (*place.sizes, padded, *entry.hf_shapes[0][1:])
    row = 0
    parts: list[Tensor] = []
    for name, stored in tensors:
        require_finite(view.folder, name, stored)
        tensor = stored.to(stored_dtype(stored.dtype, name, dtype))
        checksums.add(name, tensor)
        if entry.kind == "qkv":
            parts.append(tensor)
            continue
        out.add(place.key, tensor, shape, (*place.offsets, row, *(0,) * (rank - 1)))
        row += tensor.shape[0]
    if parts:
        out.add(place.key, entry.functions.merge(parts, arch), shape, (*place.offsets, *(0,) * rank))
    elif padded > rows:
        out.add(
            place.key, tensor.new_zeros((padded - rows, *shape[len(place.sizes) + 1 :])), shape, (*place.offsets, rows, *(0,) * (rank - 1))
        )


def _write_extra_states(out: DistributedCheckpointWriter, arch: ModelArchitecture) -> None:
    """Write the empty ``_extra_state`` (fp8 scales) that Megatron's linear layers require on load."""
    for module in _EXTRA_STATES:
        if arch.is_moe and module.startswith("mlp."):
            module = module.replace("mlp.", "mlp.experts.experts.")
            sizes: tuple[int, ...] = (arch.num_layers, arch.num_experts or 0)
        else:
            sizes = (arch.num_layers,)
        for position in product(*(range(size) for size in sizes)):
            out.add_object(f"decoder.layers.{module}._extra_state", None, position, sizes)


def megatron_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    config: str | Path | None = None,
    role: Role | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> ConversionReport:
    """Convert a distributed checkpoint to a HF folder; ``config`` is ``companions`` of :func:`open_view`.

    A critic becomes a token-classification folder with one label. Gives the same guarantees and errors as :func:`hf_to_megatron`.
    """
    refuse_existing(destination)
    with open_view(source, role=role, companions=config) as view, new_folder(destination) as folder:
        if not isinstance(view, MegatronFolderView):
            raise CheckpointError(f"{source} is not a Megatron distributed checkpoint (it has no .metadata file)")
        companion_files(view.companions)
        manifest = {name: (shape, stored_dtype(view.dtype(name), name, dtype)) for name, shape in hf_manifest(view.plan).items()}
        checksums = _Checksums()
        with SafetensorsWriter(folder, manifest, max_shard_bytes=max_shard_bytes) as out, read_ahead(view) as tensors:
            for name, stored in tensors:
                require_finite(view.folder, name, stored)
                tensor = stored.to(manifest[name][1])
                checksums.add(name, tensor)
                out.write(name, tensor)
        copy_companions(view.companions, folder, view.architecture, role=view.role, dtype=next(iter(manifest.values()))[1])
        write_json(folder / CHECKSUMS_NAME, checksums.by_name)
        return ConversionReport(len(manifest), checksums.num_bytes, view.role, {})


class _Checksums:
    """Collects the checksums of the converted HF tensors."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.by_name: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self.num_bytes += tensor.nbytes
        self.by_name[name] = tensor_checksum(tensor)
