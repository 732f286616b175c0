"""Compare the hidden states after each layer of the trainer with those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.certify.bench import Bench
from vapo_mcore.collectives import all_gather_objects, broadcast_object
from vapo_mcore.megatron.engine import MegatronModel


@contextmanager
def _hooked(layers: Sequence[tuple[int, Any]], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``take(number, hidden states)`` after each layer's forward pass."""

    def hook(number: int) -> Callable[..., None]:
        return lambda module, inputs, output: take(number, output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook(number)) for number, layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trainer_layers(bench: Bench, model: MegatronModel, sequence: Sequence[int]) -> dict[int, Tensor]:
    """Return layer number (from 0) -> float32 [tokens, hidden] on the host, for the layers of this pipeline stage. A collective."""
    parallel = bench.parallel
    microbatches = bench.microbatches([sequence])
    layout = microbatches[0].layout
    found: dict[int, Tensor] = {}

    def take(number: int, hidden: Tensor) -> None:
        if number in found:  # from a dummy micro-batch, which follows the real one
            return
        local = hidden.detach()[:, 0].float().contiguous()
        if parallel.sequence_parallel:
            parts = [torch.empty_like(local) for _ in range(parallel.tensor_model_parallel_size)]
            dist.all_gather(parts, local, group=parallel.tensor_model_parallel_group)
            local = torch.cat(parts)
        found[number] = layout.gather(local[: layout.num_local_tokens], parallel.context_parallel_group).cpu()

    if not parallel.variable_lengths:  # one size for all, dummies included, so that the layout knows all padding
        microbatches = microbatches[:1] * len(microbatches)
    layers = [(layer.layer_number - 1, layer) for chunk in model.chunks for layer in chunk.decoder.layers]
    with _hooked(layers, take):
        model.forward(microbatches)
    return found


@torch.no_grad()
def transformers_layers(model: Any, sequence: Sequence[int]) -> dict[int, Tensor]:
    """Return the hidden states of each layer of a transformers model; not a collective."""
    found: dict[int, Tensor] = {}
    with _hooked(list(enumerate(model.model.layers)), lambda number, hidden: found.update({number: hidden[0].float().cpu()})):
        model(torch.tensor([list(sequence)]))
    return found


def layer_gaps(mine: dict[int, Tensor], reference: dict[int, Tensor] | None) -> list[float]:
    """Return ||trainer - transformers|| / ||transformers|| of each layer, the same on all ranks. ``reference``: rank 0's. A collective."""
    reference = broadcast_object(reference)
    assert reference is not None, "rank 0 has the hidden states of transformers"
    gaps = {number: float((hidden - reference[number]).norm() / reference[number].norm()) for number, hidden in mine.items()}
    merged = {number: gap for part in all_gather_objects(gaps) for number, gap in part.items()}
    return [merged[number] for number in sorted(merged)]
