"""Where the rollouts of single steps are dumped, and which dumps are complete. No torch here."""

from __future__ import annotations

from pathlib import Path

from vapo_mcore.errors import CheckpointError

STEP_INFO = "step.json"
"""Of a dump; with it the dump is complete."""


def dumps_folder(run_dir: str | Path) -> Path:
    """Where the rollouts of single steps are."""
    return Path(run_dir) / "dumps"


def require_dump(run_dir: str | Path, name: str) -> Path:
    """The folder of a dump. Raises CheckpointError, naming the dumps that there are, where it is not there or unfinished."""
    folder = dumps_folder(run_dir) / name
    if not (folder / STEP_INFO).is_file():
        there = ", ".join(sorted(path.parent.name for path in dumps_folder(run_dir).glob(f"[!.]*/{STEP_INFO}"))) or "none"
        raise CheckpointError(
            f"{folder} is no dump of a step; there are: {there}. Steps are dumped with run.dump_steps and run.dump_every_steps, and where "
            "a step ended the run"
        )
    return folder
