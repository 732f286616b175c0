"""Save and load the mini-batch whose skipped update stopped a run. The files suffice to repeat the update; reading them runs no code.

<run.dir>/faults/bad_batch_<stage>_step_0012_policy/
    batch.json                  reason, position in the run, rows, number of ranks and micro-batches
    data_rank_0000.safetensors  micro-batches of one data-parallel rank, exactly as passed to the loss
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vapo_mcore import __version__
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES, Rows
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience.step_dump import json_number, row_records
from vapo_mcore.megatron.engine import choices_name
from vapo_mcore.megatron.parallel import ParallelContext

FORMAT = 1
_INFO = "batch.json"


@dataclass(frozen=True)
class BadUpdate:
    """A skipped update: its position in the run, model, reason, loss and gradient norm."""

    stage: str
    step: int
    role: str
    epoch: int
    minibatch: int
    reason: str
    loss: float
    grad_norm: float

    @property
    def folder_name(self) -> str:
        return f"bad_batch_{self.stage}_step_{self.step:04d}_{self.role}"


def save_bad_batch(
    faults: Path, update: BadUpdate, rows: Rows, row_ids: Tensor, microbatches: Sequence[MicroBatch], parallel: ParallelContext
) -> Path:
    """Write this rank's part and return the folder. Every rank calls it; TP, PP and CP rank 0 of each data-parallel rank writes.

    Raises OSError.

    Args:
        faults: parent of the new folder.
        rows: all responses of the rollout, replicated.
        row_ids: int64, global row number of each row in this rank's batch; ``microbatches[...].rows`` index it.
    """
    folder = faults / update.folder_name
    model_parallel_ranks = (parallel.tensor_model_parallel_rank, parallel.pipeline_model_parallel_rank, parallel.context_parallel_rank)
    if any(model_parallel_ranks):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # without the choices of experts, which are of this pipeline rank's layers only
    names = sorted(set(microbatches[0].tensors) - {choices_name("policy"), choices_name("critic"), ENGINE_CHOICES})
    tensors: dict[str, Tensor] = {}
    for number, microbatch in enumerate(microbatches):
        parts = {name: microbatch.tensors[name].detach().cpu().clone() for name in names}
        parts |= {"rows": row_ids[microbatch.rows], "lengths": microbatch.layout.lengths.cpu().clone()}
        tensors |= {f"{number:04d}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    _publish(folder / f"data_rank_{parallel.data_parallel_rank:04d}.safetensors", tensors)
    if parallel.rank == 0:
        info = {
            "format": FORMAT,
            "vapo_mcore": __version__,
            **{name: json_number(value) for name, value in vars(update).items()},
            "data_parallel_size": parallel.data_parallel_size,
            "microbatches": len(microbatches),
            "tensors": names,
            "rows": row_records(rows),
        }
        unfinished = folder / f".{_INFO}"
        unfinished.write_text(json.dumps(info, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.rename(folder / _INFO)
    return folder


def load_bad_batch(folder: str | Path, data_parallel_rank: int, parallel: ParallelContext) -> tuple[dict[str, Any], list[MicroBatch]]:
    """Return the contents of ``batch.json`` and the micro-batches of one data-parallel rank, laid out for ``parallel``.

    TP, PP and CP may differ from the run's: the stored tensors are not split along them. Raises CheckpointError for a folder that is
    missing, incomplete or in another format.
    """
    folder = Path(folder)
    path = folder / f"data_rank_{data_parallel_rank:04d}.safetensors"
    try:
        info: dict[str, Any] = json.loads((folder / _INFO).read_text(encoding="utf-8"))
        if info["format"] != FORMAT:
            raise CheckpointError(f"{folder}: written in format {info['format']}, but this version reads format {FORMAT}")
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a safetensors handle is no dictionary)
    except CheckpointError:
        raise
    except Exception as error:  # of safetensors, json or the file system
        raise CheckpointError(f"{folder}: cannot read the bad batch: {type(error).__name__}: {error}") from error
    return info, [_microbatch(stored, f"{number:04d}.", parallel) for number in range(info["microbatches"])]


def _microbatch(stored: dict[str, Tensor], prefix: str, parallel: ParallelContext) -> MicroBatch:
    parts = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    layout = ThdLayout(
        parts.pop("lengths").tolist(),
        context_parallel_size=parallel.context_parallel_size,
        context_parallel_rank=parallel.context_parallel_rank,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
        device=parallel.device,
    )
    rows = parts.pop("rows")
    return MicroBatch(layout, rows, {name: tensor.to(parallel.device) for name, tensor in parts.items()})


def _publish(path: Path, tensors: dict[str, Tensor]) -> None:
    unfinished = path.with_name(f".{path.name}")
    save_file(tensors, unfinished)
    unfinished.rename(path)
