"""Verify that two model folders hold the same model: tensor by tensor, or by the logits of Hugging Face and Megatron."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.plan import global_parameters, hf_manifest, match_parameters, plan_mapping, require_complete
from vapo_mcore.weights.views import HfView, open_view
from vapo_mcore.weights.writer import CHECKSUMS_NAME


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`: number of tensors compared, and tensor name -> difference."""

    tensors: int
    differences: dict[str, str]

    @property
    def equal(self) -> bool:
        return not self.differences


def compare(first: str | Path, second: str | Path, *, config: str | Path | None = None) -> Comparison:
    """Compare two models (HF or Megatron folders) tensor by tensor, bitwise in the less precise of the two dtypes."""
    with open_view(first, companions=config) as left, open_view(second, companions=config) as right:
        shapes = [hf_manifest(view.plan) for view in (left, right)]
        differences = dict.fromkeys(sorted(shapes[0].keys() ^ shapes[1].keys()), "is in only one of the models")
        if left.role != right.role or differences:
            return Comparison(len(shapes[0]), differences or {"role": f"{left.role} and {right.role}"})
        for (name, one), (_, other) in zip(left.all_tensors(), right.all_tensors(), strict=True):
            difference = _difference(one, other)
            if difference is not None:
                differences[name] = difference
        return Comparison(len(shapes[0]), differences)


def _difference(one: Tensor, other: Tensor) -> str | None:
    if one.shape != other.shape:
        return f"shapes {list(one.shape)} and {list(other.shape)}"
    coarse = one.dtype if one.dtype.itemsize <= other.dtype.itemsize else other.dtype
    if torch.equal(one.to(coarse), other.to(coarse)):
        return None
    gap = (one.double() - other.double()).abs()
    return f"{int((gap > 0).sum())} of {one.numel()} numbers differ, by at most {gap.max().item():.3g}"


def check_own_checksums(folder: str | Path, *, config: str | Path | None = None) -> Comparison:
    """Compare a converted folder with the ``checksums.json`` that the conversion wrote into it."""
    file = Path(folder) / CHECKSUMS_NAME
    try:
        expected = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); give a second model to compare with") from error
    with open_view(folder, companions=config) as view:
        found = {name: tensor_checksum(tensor) for name, tensor in view.all_tensors()}
    names = found.keys() | expected.keys()
    wrong = {
        name: f"checksum {found.get(name)}, expected {expected.get(name)}"
        for name in sorted(names)
        if found.get(name) != expected.get(name)
    }
    return Comparison(len(names), wrong)


@dataclass(frozen=True)
class LogitComparison:
    """Differences of the float32 logits of two models on the same tokens; for critics of the values (``top1_agreement`` is None)."""

    tokens: int
    max_difference: float
    mean_difference: float
    top1_agreement: float | None


def compare_logits(hf_folder: str | Path, folder: str | Path, texts: Sequence[str], *, config: str | Path | None = None) -> LogitComparison:
    """Run ``texts`` through transformers (``hf_folder``) and through a Megatron model filled from ``folder`` (HF or Megatron).

    Both sides run one forward pass per text: a matrix product with one row sums in a different order than one with many rows, which
    changes SmolLM2's logits by up to 7e-5 (as much as their error against float64). transformers runs on the CPU, Megatron on this
    process's device, both in float32 without TF32. The process must not have a process group of more than one rank. Raises
    CheckpointError for invalid folders and for texts without tokens.
    """
    sequences = _tokenize(hf_folder, texts)
    with open_view(folder, companions=config) as view:
        ours = _megatron_outputs(view, sequences)
        theirs = _hf_outputs(hf_folder, view.role, sequences)
    gaps = [(one - other).abs() for one, other in zip(ours, theirs, strict=True)]
    count = sum(gap.numel() for gap in gaps)
    agreement = None
    tokens = sum(len(sequence) for sequence in sequences)
    if view.role != "critic":
        agreement = sum(int((one.argmax(-1) == other.argmax(-1)).sum()) for one, other in zip(ours, theirs, strict=True)) / tokens
    mean = sum(gap.double().sum().item() for gap in gaps) / count
    return LogitComparison(tokens, max(gap.max().item() for gap in gaps), mean, agreement)


def _tokenize(hf_folder: str | Path, texts: Sequence[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(hf_folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{hf_folder} has no usable tokenizer: {error}") from error
    sequences = [tokenizer(text)["input_ids"] for text in texts]
    empty = [number for number, sequence in enumerate(sequences, 1) if not sequence]
    if empty or not sequences:
        raise CheckpointError(f"texts without tokens: {empty or 'no text was given'}")
    return sequences


def _hf_outputs(folder: str | Path, role: str, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if role == "critic" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa")
    model.eval()
    with torch.no_grad():
        return [model(torch.tensor([list(sequence)])).logits[0] for sequence in sequences]


def _megatron_outputs(view: HfView, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    from vapo_mcore.config.schema import ModelConfig, ParallelConfig
    from vapo_mcore.data.thd import ThdLayout
    from vapo_mcore.megatron.host import megatron_scope
    from vapo_mcore.megatron.model import build_chunks
    from vapo_mcore.megatron.parallel import initialize_parallel

    parallel = initialize_parallel(ParallelConfig(world_size=1))
    torch.set_float32_matmul_precision("highest")  # some container images enable TF32 by an environment variable
    settings = ModelConfig(path=str(view.companions), dtype="float32", attention="sdpa")  # Transformer Engine would use TF32
    (chunk,) = build_chunks(view.role, view.architecture, settings, parallel, for_training=False)
    fill_from_view(chunk, view)
    width = 1 if view.role == "critic" else view.architecture.vocab_size
    outputs = []
    for sequence in sequences:
        layout = ThdLayout(
            [len(sequence)], context_parallel_size=1, context_parallel_rank=0, tensor_parallel_size=1, device=parallel.device
        )
        params = layout.packed_seq_params()
        tokens = layout.shard(torch.tensor(sequence, device=parallel.device), 0)
        with torch.no_grad(), megatron_scope():
            outputs.append(chunk(tokens[None], None, None, packed_seq_params=params)[0, :, :width].float().cpu())
    return outputs


@torch.no_grad()
def fill_from_view(chunk: Any, view: HfView) -> None:
    """Fill an unsharded model (one chunk, TP 1) from a folder of either kind."""
    plan = plan_mapping(view.architecture, view.role)
    parameters = match_parameters(plan, global_parameters([chunk]))
    require_complete(plan, parameters)
    for index, parameter in parameters.items():
        entry = plan[index]
        full = entry.functions.merge([tensor for _, tensor in view.tensors(entry)], view.architecture)
        parameter.copy_(entry.functions.shard(full, 1, 0, view.architecture))
