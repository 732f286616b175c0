"""Micro-batches: rows of the local rollout batch, packed for one forward pass of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vapo_mcore.data.ragged import token_index
from vapo_mcore.data.rollout_batch import RolloutBatch
from vapo_mcore.data.thd import ThdLayout


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that pass through the model together.

    Attributes:
        layout: padding and context-parallel split of the sequences.
        rows: int64 ``[n]``, indices of the rows in the local ``RolloutBatch``, in packed order; empty for a dummy.
        tensors: name to token-aligned, unpadded tensor ``[layout.num_tokens, ...]`` in packed order, on the layout's device.
        index: int64 ``[layout.num_tokens]`` on the layout's device, positions of the tokens in the local ``RolloutBatch``: kept, because
            making it again for every pass would make the host wait for the device. None without a batch.
    """

    layout: ThdLayout
    rows: Tensor
    tensors: dict[str, Tensor]
    index: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rows.numel() != self.layout.num_sequences:
            raise ValueError(f"{self.rows.numel()} rows but a layout of {self.layout.num_sequences} sequences")
        for name, tensor in self.tensors.items():
            if tensor.shape[0] != self.layout.num_tokens:
                raise ValueError(f"tensor {name} has {tensor.shape[0]} tokens, the layout has {self.layout.num_tokens}")

    @property
    def is_dummy(self) -> bool:
        """True if the micro-batch has no rows and only keeps this rank's collectives in step with the other ranks."""
        return self.layout.is_dummy

    def with_tensors(self, **tensors: Tensor) -> MicroBatch:
        """Return a copy with tensors added or replaced."""
        return replace(self, tensors={**self.tensors, **tensors})


def make_microbatch(
    batch: RolloutBatch,
    local_rows: Sequence[int] | Tensor,
    *,
    context_parallel_size: int = 1,
    context_parallel_rank: int = 0,
    tensor_parallel_size: int = 1,
    device: torch.device | str = "cpu",
    names: Iterable[str] | None = None,
) -> MicroBatch:
    """Pack ``local_rows`` of ``batch`` in that order; no rows gives the dummy micro-batch.

    Takes only the tensors in ``names`` (None: all) and moves them to ``device``.
    """
    rows = torch.as_tensor(local_rows, dtype=torch.int64, device="cpu")
    layout = ThdLayout(
        batch.lengths[rows],
        context_parallel_size=context_parallel_size,
        context_parallel_rank=context_parallel_rank,
        tensor_parallel_size=tensor_parallel_size,
        device=device,
    )
    index = token_index(batch.cu_seqlens, rows)
    on_device = index.to(layout.device, non_blocking=True)
    wanted = list(batch.tensors) if names is None else list(names)
    tensors = {}
    for name in wanted:
        source = batch[name]
        mine = on_device if source.device == on_device.device else index
        tensors[name] = source.index_select(0, mine).to(device, non_blocking=True)
    return MicroBatch(layout, rows, tensors, on_device)
