"""Locate the dumped rollouts of single steps and check that they are complete. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from vapo_mcore.errors import CheckpointError

STEP_INFO = "step.json"
"""File written last: a dump that has it is complete."""


def dumps_folder(run_dir: str | Path) -> Path:
    """Return the folder that holds the dumps of a run."""
    return Path(run_dir) / "dumps"


def require_dump(run_dir: str | Path, name: str) -> Path:
    """Return the folder of a dump. Raises CheckpointError, which lists the existing dumps, if it is missing or incomplete."""
    folder = dumps_folder(run_dir) / name
    if not (folder / STEP_INFO).is_file():
        existing = ", ".join(sorted(path.parent.name for path in dumps_folder(run_dir).glob(f"[!.]*/{STEP_INFO}"))) or "none"
        raise CheckpointError(
            f"{folder} is not the dump of a step; existing dumps: {existing}. Steps are dumped according to run.dump_steps and "
            "run.dump_every_steps, and when a step ends the run"
        )
    return folder
