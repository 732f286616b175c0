"""Load a Hugging Face folder into this rank's Megatron model chunks, one tensor group at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vapo_mcore import heartbeat
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.families import HEAD_PREFIX
from vapo_mcore.weights.plan import (
    Bijection,
    MappedTensor,
    Role,
    check_bijection,
    global_parameters,
    match_parameters,
    plan_mapping,
    require_complete,
)
from vapo_mcore.weights.reader import SafetensorsFolder

HeadInit = Literal["zero", "small"]
SMALL_HEAD_OUTPUT_STD = 0.1
"""Standard deviation of the values of a ``small`` head for hidden states of unit root mean square."""


class ParallelLayout(Protocol):
    """The part of the parallel context that loading and exporting use."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def tensor_model_parallel_rank(self) -> int: ...
    @property
    def tensor_model_parallel_group(self) -> Any: ...
    @property
    def pipeline_model_parallel_size(self) -> int: ...
    @property
    def pipeline_model_parallel_rank(self) -> int: ...
    @property
    def pipeline_model_parallel_group(self) -> Any: ...
    @property
    def context_parallel_rank(self) -> int: ...
    @property
    def data_parallel_rank(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_rank(self) -> int: ...
    @property
    def expert_model_parallel_group(self) -> Any: ...
    @property
    def expert_tensor_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_rank(self) -> int: ...
    @property
    def expert_tensor_parallel_group(self) -> Any: ...


@dataclass
class LoadReport:
    """Result of loading on this rank.

    ``dropped``: unused tensors of the folder, with the reason; ``head``: source of a critic's head ("score.weight",
    "score.weight + score.bias", "zero", "small"; None for a policy).
    """

    parameters: int = 0
    num_bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    head: str | None = None


def load_hf_into(
    chunks: Sequence[nn.Module],
    folder: str | Path,
    architecture: ModelArchitecture,
    parallel: ParallelLayout,
    *,
    role: Role,
    head_init: HeadInit | None = None,
    seed: int = 0,
) -> LoadReport:
    """Fill every parameter of this rank's (unwrapped) GPTModel chunks from a Hugging Face safetensors folder.

    Each rank reads its part of each tensor and casts it to the parameter's dtype. Names and shapes of the whole model are compared with
    the folder before any tensor is read, and the pipeline ranks (of a mixture also the expert-parallel ranks) together verify that nothing
    is missing, so all of them must call this. A critic loads the trunk. With ``head_init`` None its scalar head is loaded from the folder's
    ``score.*`` (a missing ``score.bias`` is zero); otherwise its last layer is zero or small random numbers, equal on every rank
    (``seed``). Raises CheckpointError naming every missing, unexpected or wrongly shaped tensor, or the first one with NaN or inf.
    """
    assert role == "critic" or head_init is None, "only a critic has a head to initialise"
    plan = plan_mapping(architecture, role)
    with SafetensorsFolder(folder) as source:
        bijection = check_bijection(
            plan, source.shapes, arch=architecture, role=role, where=str(folder), new_head=role == "critic" and head_init is not None
        )
        parameters = match_parameters(plan, global_parameters(chunks, expert_offset=expert_offset(architecture, parallel)))
        require_complete(plan, [index for stage in held_by_stage(list(parameters), architecture, parallel) for index in stage])
        report = LoadReport(dropped=bijection.dropped)
        for index, parameter in parameters.items():
            entry = plan[index]
            if entry.hf_names[0].startswith(HEAD_PREFIX):
                _fill_head(parameter, entry, source, bijection, head_init, seed)
            else:
                _fill(parameter, entry, source, architecture, parallel)
            report.parameters += 1
            report.num_bytes += parameter.numel() * parameter.element_size()
        if bijection.tied_duplicate:
            _require_tied(source, parallel)
    if role == "critic":
        names = [name for entry in plan for name in entry.hf_names if name.startswith(HEAD_PREFIX)]
        report.head = head_init or " + ".join(name for name in names if name not in bijection.missing_head)
    return report


def check_folder(folder: str | Path, architecture: ModelArchitecture, *, role: Role) -> None:
    """Check files, names, shapes and dtypes from the file headers; raises the CheckpointError that ``load_hf_into`` would raise."""
    with SafetensorsFolder(folder) as source:
        check_bijection(plan_mapping(architecture, role), source.shapes, arch=architecture, role=role, where=str(folder))


def expert_offset(architecture: ModelArchitecture, parallel: ParallelLayout) -> int:
    """Return the global index of this rank's first expert in each layer, 0 for a dense model."""
    if architecture.num_experts is None:
        return 0
    return parallel.expert_model_parallel_rank * (architecture.num_experts // parallel.expert_model_parallel_size)


def held_by_stage(held: list[Any], architecture: ModelArchitecture, parallel: ParallelLayout) -> list[list[Any]]:
    """Gather the parts of the pipeline stages, stage by stage; for a mixture, of all expert-parallel ranks of a stage."""
    if architecture.is_moe and parallel.expert_model_parallel_size > 1:
        parts: list[list[Any]] = [[] for _ in range(parallel.expert_model_parallel_size)]
        dist.all_gather_object(parts, held, group=parallel.expert_model_parallel_group)
        held = list(dict.fromkeys(entry for part in parts for entry in part))
    if parallel.pipeline_model_parallel_size == 1:
        return [held]
    stages: list[list[Any]] = [[] for _ in range(parallel.pipeline_model_parallel_size)]
    dist.all_gather_object(stages, held, group=parallel.pipeline_model_parallel_group)
    return stages


@torch.no_grad()
def _fill(
    parameter: Tensor, entry: MappedTensor, source: SafetensorsFolder, architecture: ModelArchitecture, parallel: ParallelLayout
) -> None:
    handles = [source.tensor(name) for name in entry.hf_names]
    tp, rank = parallel.tensor_model_parallel_size, parallel.tensor_model_parallel_rank
    if entry.is_expert:
        tp, rank = parallel.expert_tensor_parallel_size, parallel.expert_tensor_parallel_rank
    value = entry.functions.load(handles, tp, rank, architecture)
    _require_finite(value, entry, source)
    _copy(parameter, value, entry)


@torch.no_grad()
def _fill_head(
    parameter: Tensor, entry: MappedTensor, source: SafetensorsFolder, bijection: Bijection, head_init: HeadInit | None, seed: int
) -> None:
    name = entry.hf_names[0]
    if head_init is None and name not in bijection.missing_head:
        value = source.read(name)
        _require_finite(value, entry, source)
        _copy(parameter, value, entry)
    elif name == "score.dense.weight":  # random even if the last layer is zero: with zeros in both, neither would receive a gradient
        _copy(parameter, _random(entry, 1.0, seed + 1), entry)
    elif head_init == "small" and name.endswith("weight"):
        _copy(parameter, _random(entry, SMALL_HEAD_OUTPUT_STD, seed), entry)
    else:
        parameter.zero_()


def _random(entry: MappedTensor, output_std: float, seed: int) -> Tensor:
    """Draw a weight matrix whose outputs have this standard deviation for inputs of unit root mean square."""
    shape = entry.hf_shapes[0]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (output_std / math.sqrt(shape[-1]))


def _copy(parameter: Tensor, value: Tensor, entry: MappedTensor) -> None:
    heartbeat.alive()
    assert parameter.shape == value.shape, f"{entry.mcore_name} is {tuple(parameter.shape)}, its rule gives {tuple(value.shape)}"
    parameter.copy_(value)


def _require_finite(value: Tensor, entry: MappedTensor, source: SafetensorsFolder) -> None:
    if value.numel() and not all_finite(value):
        bad = [name for name in entry.hf_names if not all_finite(source.read(name))]
        raise CheckpointError(f"{source.folder}: NaN or infinite weights in {', '.join(bad)}; the checkpoint is damaged")


def all_finite(value: Tensor) -> bool:
    """Return whether a non-empty tensor has neither NaN nor inf."""
    low, high = torch.aminmax(value)  # one pass without a temporary; NaN propagates
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _require_tied(source: SafetensorsFolder, parallel: ParallelLayout) -> None:
    """Raise CheckpointError unless a tied checkpoint's stored output layer equals the embedding; Megatron keeps only one of them."""
    count = source.info("lm_head.weight").shape[0]
    size, rank = parallel.tensor_model_parallel_size, parallel.tensor_model_parallel_rank
    if not source.equal("lm_head.weight", "model.embed_tokens.weight", (count * rank // size, count * (rank + 1) // size)):
        raise CheckpointError(
            f"{source.folder}: config.json says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings to false or remove the wrong tensor"
        )
