"""Choose the checkpoint to replay a step from, and check the files involved. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo_mcore import checkpoint_files as files
from vapo_mcore.checkpoint_files import Manifest, Stage
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import CheckpointError, ConfigError
from vapo_mcore.metrics_file import Row
from vapo_mcore.records.dumps import require_dump


@dataclass(frozen=True)
class ReplayOptions:
    """The step to replay, the checkpoint to start from (a folder in ``checkpoints/``; None: newest before the step), and the JSON file."""

    step: int
    stage: Stage = "rl"
    checkpoint: str | None = None
    json_path: str | None = None

    @property
    def name(self) -> str:
        """Name of the step's dump, and of the checkpoint after the step."""
        return files.checkpoint_name(self.stage, self.step)


def checkpoint_before(run_dir: str | Path, options: ReplayOptions) -> str | None:
    """Return the name of the checkpoint to start from: the given one, or the newest before the step; None if there is none.

    Raises CheckpointError if the given one does not exist or is not before the step.
    """
    names = [path.name for path in files.list_checkpoints(run_dir)]
    before = [name for name in names if files.order(name) < files.order(options.name)]
    if options.checkpoint is None:
        return before[-1] if before else None
    if options.checkpoint not in names:
        shown = ", ".join(names) or "none"
        raise CheckpointError(f"{files.checkpoints_folder(run_dir)} has no checkpoint {options.checkpoint!r}; there are: {shown}")
    if options.checkpoint not in before:
        raise CheckpointError(
            f"--checkpoint {options.checkpoint} is not before step {options.step} ({options.stage}): it contains the step's result"
        )
    return options.checkpoint


def check_replay(config: Config, options: ReplayOptions) -> None:
    """Check before a model loads that the dump and the checkpoint exist and that the comparison can be written.

    Raises CheckpointError or ConfigError.
    """
    require_dump(config.run.dir, options.name)
    checkpoint_before(config.run.dir, options)
    if options.json_path is not None:
        check_json_path(options.json_path)


def check_json_path(path: str) -> None:
    """Raise ConfigError unless ``path`` can be written. Creates nothing."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--json {path!r} cannot be written: the folder {str(folder)!r} does not exist; create it first")
    if Path(path).is_dir():
        raise ConfigError(f"--json {path!r} cannot be written: it is a folder; give the path of a file")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"--json {path!r} cannot be written: no permission")


def is_exact(options: ReplayOptions, manifest: Manifest | None, rows: Sequence[Row]) -> bool:
    """Return whether a checkpoint (None: the initial models) is the state right before the step. ``rows``: the run's metric rows."""
    if manifest is not None and manifest.stage == options.stage:
        return manifest.step == options.step - 1
    if options.step > 1:
        return False
    if options.stage == "value_pretraining":
        return manifest is None
    pretrained = max((row["step"] for row in rows if row.get("stage") == "value_pretraining"), default=0)  # pretraining may end early
    return pretrained == (0 if manifest is None else manifest.step)
