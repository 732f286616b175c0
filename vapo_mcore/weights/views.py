"""Common view of a model's HF tensors on disk, stored as a Hugging Face folder or as a Megatron distributed checkpoint."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.distcp import METADATA_NAME, DistributedCheckpointReader
from vapo_mcore.weights.families import HEAD_PREFIX
from vapo_mcore.weights.loader import all_finite
from vapo_mcore.weights.plan import MappedTensor, Role, check_bijection, plan_mapping
from vapo_mcore.weights.reader import SafetensorsFolder

HF_SUBFOLDER = "hf"
"""Subfolder of a Megatron checkpoint with the HF config and tokenizer files."""

_LAYER_KEY = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT_KEY = re.compile(r"experts\.local_experts\.(\d+)\.|experts\.(linear_fc[12]\.weight)(\d+)$")


@dataclass(frozen=True)
class Placement:
    """Location of a plan entry in a distributed checkpoint.

    Megatron stacks the same parameter of all layers (and experts) into one tensor ``key`` with leading axes of sizes ``sizes``; the entry
    is at ``offsets`` of these axes.
    """

    key: str
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def placements(entry: MappedTensor, arch: ModelArchitecture) -> list[Placement]:
    """Return the possible placements in order of preference.

    Transformer Engine's names come first (our local layers are saved under them too), then the local names, then both with one key per
    layer, as in heterogeneous models.
    """
    stacked, plain = [], []
    for name in reversed(entry.mcore_names):
        match = _LAYER_KEY.match(name)
        if match is None:
            plain.append(Placement(name))
            continue
        rest = name[match.end() :]
        offsets: tuple[int, ...] = (int(match[1]),)
        sizes: tuple[int, ...] = (arch.num_layers,)
        expert = _EXPERT_KEY.search(rest)
        if expert is not None:
            rest = f"{rest[: expert.start()]}experts.experts.{expert[2] or rest[expert.end() :]}"
            offsets, sizes = (*offsets, int(expert[1] or expert[3])), (*sizes, arch.num_experts or 0)
        stacked.append(Placement(f"decoder.layers.{rest}", offsets, sizes))
        plain.append(Placement(name))
    return list(dict.fromkeys(stacked + plain))


class HfView(ABC):
    """View of the HF tensors of a model on disk. Use as a context manager.

    ``plan``: the mapping; ``folder``: the opened folder; ``companions``: the folder with config and tokenizer files.
    """

    def __init__(self, folder: Path, companions: Path, role: Role) -> None:
        self.folder, self.companions, self.role = folder, companions, role
        self.architecture = read_architecture(companions)
        self.plan = [entry for entry in plan_mapping(self.architecture, role) if not entry.tied_copy]

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the stored tensors."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a HF tensor."""

    @abstractmethod
    def tensors(self, entry: MappedTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the HF tensors of one plan entry in order."""

    @abstractmethod
    def close(self) -> None:
        """Close open files."""

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all HF tensors in plan order. Raises CheckpointError naming a tensor with NaN or inf."""
        for entry in self.plan:
            for name, tensor in self.tensors(entry):
                require_finite(self.folder, name, tensor)
                yield name, tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def require_finite(folder: Path, name: str, tensor: Tensor) -> None:
    if tensor.numel() and not all_finite(tensor):
        raise CheckpointError(f"{folder}: NaN or infinite weights in {name}; the checkpoint is damaged")


class HfFolderView(HfView):
    """View of a Hugging Face folder. A critic's missing ``score.bias`` is read as zero."""

    def __init__(self, folder: Path, role: Role | None) -> None:
        self._source = SafetensorsFolder(folder)
        shapes = self._source.shapes
        super().__init__(folder, folder, role or ("critic" if any(name.startswith(HEAD_PREFIX) for name in shapes) else "policy"))
        check = check_bijection(self.plan, shapes, arch=self.architecture, role=self.role, where=str(folder))
        if check.tied_duplicate and not self._source.equal("lm_head.weight", "model.embed_tokens.weight"):
            raise CheckpointError(f"{folder}: config.json says tie_word_embeddings, but lm_head.weight differs from the embedding")
        self.dropped = check.dropped
        self._zero = set(check.missing_head)

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def dtype(self, name: str) -> torch.dtype:
        return self._source.info("score.weight" if name in self._zero else name).dtype

    def tensors(self, entry: MappedTensor) -> Iterator[tuple[str, Tensor]]:
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            yield name, torch.zeros(shape, dtype=self.dtype(name)) if name in self._zero else self._source.read(name)

    def close(self) -> None:
        self._source.close()


class MegatronFolderView(HfView):
    """View of a model's distributed checkpoint, saved by Megatron at any layout or written by the converter."""

    def __init__(self, folder: Path, role: Role | None, companions: Path) -> None:
        self._source = DistributedCheckpointReader(folder)
        super().__init__(folder, companions, role or ("critic" if "output_layer.bias" in self._source else "policy"))
        self._entry_names = {name: entry.mcore_name for entry in self.plan for name in entry.hf_names}
        self._places: dict[str, Placement] = {}
        self._check()

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def _check(self) -> None:
        faults = []
        for entry in self.plan:
            place = next((place for place in placements(entry, self.architecture) if place.key in self._source), None)
            if place is None:
                faults.append(f"missing: {' or '.join(entry.mcore_names)}")
                continue
            self._places[entry.mcore_name] = place
            shape, full = self._source.shape(place.key), (*place.sizes, *entry.shard_shape(1, self.architecture))
            rows = len(place.sizes)
            padded = entry.kind == "vocab" and len(shape) == len(full) and shape[rows] >= self.architecture.vocab_size
            if shape != full and not (padded and shape[:rows] + shape[rows + 1 :] == full[:rows] + full[rows + 1 :]):
                faults.append(f"{place.key} has shape {list(shape)}, expected {list(full)}")
        used = {place.key for entry in self.plan for place in placements(entry, self.architecture)}
        faults += [f"no mapping rule: {key}" for key in self._source.keys if key.startswith("decoder.") and key not in used]
        if faults:
            shown = "\n  ".join(dict.fromkeys(faults[:12])) + (f"\n  ... and {len(faults) - 12} more" if len(faults) > 12 else "")
            raise CheckpointError(f"{self.folder} does not match {self.companions / 'config.json'}:\n  {shown}")

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._places[self._entry_names[name]].key)

    def tensors(self, entry: MappedTensor) -> Iterator[tuple[str, Tensor]]:
        place = self._places[entry.mcore_name]
        if entry.kind == "qkv":
            full = self._region(place, entry.shard_shape(1, self.architecture))
            yield from zip(entry.hf_names, entry.functions.split(full, self.architecture), strict=True)
            return
        row = 0  # gate and up, or the vocabulary without padding, are blocks of rows; read them one at a time
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            yield name, self._region(place, shape, row)
            row += shape[0]

    def _region(self, place: Placement, shape: tuple[int, ...], first_row: int = 0) -> Tensor:
        ones = (1,) * len(place.sizes)
        return self._source.read(place.key, (*place.offsets, first_row, *(0,) * (len(shape) - 1)), (*ones, *shape)).reshape(shape)


def open_view(folder: str | Path, *, role: Role | None = None, companions: str | Path | None = None) -> HfView:
    """Open a HF folder or a Megatron distributed checkpoint.

    ``role``: kind of model (None: detect it). ``companions``: HF folder with the config of a Megatron checkpoint (default: its subfolder
    ``hf``).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"model folder {str(folder)!r} does not exist")
    if (folder / METADATA_NAME).exists():
        if companions is None and not (folder / HF_SUBFOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no subfolder {HF_SUBFOLDER!r}; give a Hugging Face folder with the model's config.json (--config)"
            )
        return MegatronFolderView(folder, role, Path(companions or folder / HF_SUBFOLDER))
    return HfFolderView(folder, role)
