"""Save and load the sampled and graded rollout of a step. Together with the weights before the step it suffices to replay the step.

<run.dir>/dumps/step_000012/          (of value pretraining: value_pretraining_000003/)
    step.json                         rows, holding ranks and counts; written last, so a dump with it is complete
    rank_0000.safetensors             tokens, mask, log-probs and the engine's choices of experts of the responses held by one rank

Reading a dump executes no code from it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vapo_mcore import __version__
from vapo_mcore.checkpoint_files import Stage, checkpoint_name
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import Round, no_rows
from vapo_mcore.records.dumps import STEP_INFO, dumps_folder, require_dump

FORMAT = 1


@dataclass(frozen=True)
class StepDump:
    """Contents of a dump. ``rollouts``: number of the rollout over both stages, which seeds the mini-batches."""

    stage: Stage
    step: int
    rollouts: int
    sampled: Round
    counts: SamplingCounts


def dump_folder(run_dir: str | Path, stage: Stage, step: int) -> Path:
    return dumps_folder(run_dir) / checkpoint_name(stage, step)


def save_step(run_dir: str | Path, dump: StepDump, rank: int) -> str | None:
    """Write a dump, replacing an earlier one of the same step. Returns None or, on all ranks, the error message. Collective."""
    folder = dump_folder(run_dir, dump.stage, dump.step)

    def failure(write: Any, *arguments: Any) -> str | None:
        found = None
        try:
            write(*arguments)
        except (OSError, SafetensorError) as error:
            found = str(error)
        return next((text for text in all_gather_objects(found) if text is not None), None)

    return (
        failure(_make_folder, folder, rank)
        or failure(_write_tokens, folder, dump.sampled.local, rank)
        or failure(_write_info, folder, dump, rank)
    )


def _make_folder(folder: Path, rank: int) -> None:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _write_tokens(folder: Path, local: RolloutBatch, rank: int) -> None:
    if len(local):
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in local.tensors.items()}
        save_file(tensors | {"row_ids": local.row_ids, "cu_seqlens": local.cu_seqlens.cpu()}, folder / f"rank_{rank:04d}.safetensors")


def _write_info(folder: Path, dump: StepDump, rank: int) -> None:
    if rank != 0:
        return
    info = {
        "format": FORMAT,
        "vapo_mcore": __version__,
        "stage": dump.stage,
        "step": dump.step,
        "rollouts": dump.rollouts,
        "counts": asdict(dump.counts),
        "holder": dump.sampled.holder.tolist(),
        "rows": row_records(dump.sampled.rows),
    }
    unfinished = folder / f".{STEP_INFO}"
    unfinished.write_text(json.dumps(info, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.rename(folder / STEP_INFO)


def load_step(run_dir: str | Path, stage: Stage, step: int, *, rank: int, world_size: int, known: Tensor) -> StepDump:
    """Load this rank's part of a dump. The number of ranks may differ from the run's.

    ``known``: bool ``[vocab_size]``, True for token ids that the model's tokenizer has.

    Raises CheckpointError for a dump that is missing, incomplete, damaged, in another format, or from a model with other tokens.
    """
    folder = require_dump(run_dir, checkpoint_name(stage, step))
    try:
        info: dict[str, Any] = json.loads((folder / STEP_INFO).read_text(encoding="utf-8"))
        if info["format"] != FORMAT:
            raise CheckpointError(f"{folder}: written in format {info['format']}, but this version reads format {FORMAT}")
        rows = rows_of(info["rows"])
        # If the run had more ranks, distribute their parts over the present ones.
        holder = torch.tensor(info["holder"], dtype=torch.int64) % world_size
        files = sorted(folder.glob("rank_*.safetensors"))
        parts = [_read_tokens(path, rows, known) for path in files if _rank_of(path) % world_size == rank]
        if not parts and files:  # a rank without rows has the same tensors
            parts = [_read_tokens(files[0], rows, known).select([])]
        counts = SamplingCounts.of_record(info["counts"])
        rollouts = int(info["rollouts"])
    except CheckpointError:
        raise
    except Exception as error:  # of safetensors, json or the columns
        raise CheckpointError(f"{folder}: cannot read the dump: {type(error).__name__}: {error}") from error
    local = RolloutBatch.concat(parts) if parts else no_rows()
    held = int((holder == rank).sum())
    if len(local) != held:
        raise CheckpointError(f"{folder}: expected {held} responses for rank {rank}, found {len(local)}: a file is missing")
    if len(holder) != len(rows) or sorted(local.row_ids.tolist()) != (holder == rank).nonzero().flatten().tolist():
        raise CheckpointError(f"{folder}: the rank files do not hold the rows listed in {STEP_INFO}: the dump is damaged")
    return StepDump(stage, step, rollouts, Round(rows, holder, local, {}), counts)


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank_"))


def _read_tokens(path: Path, rows: Rows, known: Tensor) -> RolloutBatch:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safetensors handle is no dictionary)
    row_ids, cu_seqlens = tensors.pop("row_ids"), tensors.pop("cu_seqlens")
    if row_ids.numel() and (int(row_ids.min()) < 0 or int(row_ids.max()) >= len(rows)):
        raise CheckpointError(f"{path}: holds rows {int(row_ids.min())} .. {int(row_ids.max())}, but {STEP_INFO} has {len(rows)} rows")
    batch = RolloutBatch(rows.select(row_ids), cu_seqlens, tensors, row_ids)  # validates lengths
    tokens, mask = batch["tokens"], batch["response_mask"]
    outside = (tokens < 0) | (tokens >= known.numel())
    if outside.any():
        raise CheckpointError(
            f"{path}: token id {int(tokens[outside][0])} is not in the model's vocabulary of {known.numel()}: the dump is damaged, or "
            "model.path is not the run's model"
        )
    unknown = ~known[tokens]
    if unknown.any():
        raise CheckpointError(
            f"{path}: token id {int(tokens[unknown][0])} is not in the tokenizer of model.path and has no probability: the dump is from "
            "another model, or from a version that sampled such ids"
        )
    marked, sampled = int(mask.sum()), int(batch.rows.response_length.sum())
    if marked != sampled:
        raise CheckpointError(f"{path}: {marked} tokens are marked as sampled, but the responses have {sampled}: the dump is damaged")
    return batch


def row_records(rows: Rows) -> list[dict[str, Any]]:
    """Convert rows to JSON objects. NaN and infinities become strings."""
    columns = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(rows).items()}
    return [{name: json_number(column[row]) for name, column in columns.items()} for row in range(len(rows))]


def json_number(value: Any) -> Any:
    """Return the value, or its name as a string if it is NaN or infinite, which JSON cannot represent."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def rows_of(records: Sequence[dict[str, Any]]) -> Rows:
    """Convert the records of ``row_records`` back to rows."""
    # Dumps of earlier versions have no segments, or no observations.
    added: dict[str, Any] = {"segments": [], "observations": []}
    columns: dict[str, Any] = {field.name: [(added | record)[field.name] for record in records] for field in fields(Rows)}
    columns["step_rewards"] = [tuple((position, float(reward)) for position, reward in steps) for steps in columns["step_rewards"]]
    for name in added:
        columns[name] = [tuple((first, second) for first, second in pairs) for pairs in columns[name]]
    for name in ("score", "reward"):
        columns[name] = torch.tensor([float(value) for value in columns[name]], dtype=torch.float32)
    for name in ("verdict", "graded", "missed_end"):
        columns[name] = torch.tensor(columns[name], dtype=torch.bool)
    for name in ("group", "sample_index", "prompt_length", "response_length", "tool_length", "turns", "observations_cut"):
        columns[name] = torch.tensor(columns[name], dtype=torch.int64)
    return Rows(**columns)
