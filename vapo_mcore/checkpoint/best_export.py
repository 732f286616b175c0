"""Export the policy with the best evaluation score so far as a Hugging Face folder, replacing the previous export atomically.

<run.dir>/best_hf/             config, tokenizer, weights, checksums.json
<run.dir>/best_hf/best.json    metric, score and step
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vapo_mcore.config.schema import BestExportConfig
from vapo_mcore.errors import CheckpointError
from vapo_mcore.metrics_file import finite_number
from vapo_mcore.weights.writer import write_json

INFO = "best.json"
_FOLDER, _REPLACED, _STEP = "best_hf", "best_hf.replaced", "best_hf.step_{:06d}"
_LEFT_BEHIND = re.compile(r"best_hf\.(replaced|step_\d{6,})")


def best_folder(run_dir: str | Path) -> Path:
    """Return the folder of the best export."""
    return Path(run_dir) / _FOLDER


def step_of(folder: Path) -> int | None:
    """Return the step at which a best export was made; None if the folder is missing or unreadable."""
    try:
        return int(json.loads((folder / INFO).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class BestExport:
    """Decides after each evaluation whether to export the policy. The metrics are replicated, so all ranks decide alike.

    ``score`` and ``step`` belong to the last export or, before any export, to the evaluation before the first step, which the policy
    must beat.
    """

    def __init__(self, settings: BestExportConfig | None) -> None:
        self.settings = settings
        self.score: float | None = None
        self.step = 0

    def start(self, metrics: Mapping[str, Any]) -> None:
        """Record the score of the evaluation before the first step."""
        if self.settings is not None:
            self.score = finite_number(metrics.get(self.settings.metric))

    def improved(self, step: int, metrics: Mapping[str, Any]) -> float | None:
        """Return the score if the policy should be exported, else None.

        It should if the score is defined, better than that of the last export, and at least ``every_steps`` steps later.
        """
        if self.settings is None:
            return None
        score = finite_number(metrics.get(self.settings.metric))
        if score is None or (self.step > 0 and step - self.step < self.settings.every_steps):
            return None
        if self.score is not None and not (score > self.score if self.settings.mode == "max" else score < self.score):
            return None
        return score

    def exported(self, step: int, score: float) -> None:
        """Record a completed export."""
        self.step, self.score = step, score

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, with the metric's name: ``load_state_dict`` ignores the score of another metric."""
        return {"metric": None if self.settings is None else self.settings.metric, "step": self.step, "score": self.score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.settings is not None and state["metric"] == self.settings.metric:
            self.step, self.score = state["step"], state["score"]


def restore_best(run_dir: str | Path) -> Path | None:
    """Complete a replacement that was killed between its two renames: install the new export if it is complete, else the previous one.

    Rank 0 calls it at the start of a run. Returns the folder that was renamed, or None if there was nothing to do. Raises
    CheckpointError.
    """
    destination = best_folder(run_dir)
    if destination.exists():
        return None
    new = [folder for folder in Path(run_dir).glob("best_hf.step_*") if _LEFT_BEHIND.fullmatch(folder.name) and step_of(folder) is not None]
    old = destination.with_name(_REPLACED)
    found = max(new, key=lambda folder: step_of(folder) or 0) if new else old if step_of(old) is not None else None
    if found is not None:
        try:
            found.rename(destination)
        except OSError as error:
            raise CheckpointError(f"cannot rename {found} to {destination}: {error.strerror or error}") from error
    return found


def staging_folder(run_dir: str | Path, step: int) -> Path:
    """Return the folder to write the export of a step to before it is installed. Removes the leftovers of killed exports."""
    for stale in Path(run_dir).glob("best_hf.*"):
        if _LEFT_BEHIND.fullmatch(stale.name):
            shutil.rmtree(stale, ignore_errors=True)
    return Path(run_dir) / _STEP.format(step)


def install_export(new: Path, run_dir: str | Path, info: Mapping[str, Any]) -> None:
    """Replace the previous export with a complete new one; the previous one is deleted last. Rank 0 only. Raises CheckpointError."""
    destination = best_folder(run_dir)
    old = destination.with_name(_REPLACED)
    try:
        write_json(new / INFO, dict(info))
        if destination.exists():
            destination.rename(old)
        try:
            new.rename(destination)
        except OSError:
            if old.exists():
                old.rename(destination)  # keep the previous export
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error.strerror or error}") from error
