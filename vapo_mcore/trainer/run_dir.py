"""The run directory: made once by rank 0, never reused without ``--clean``, and only deleted if it is one of ours.

<run.dir>/config.yaml            the resolved configuration
<run.dir>/metrics.jsonl          one JSON object a step
<run.dir>/samples/step_NNNN.jsonl   sampled responses with their scores
<run.dir>/evaluations/step_NNNN.json, .md   results on the evaluation sets
<run.dir>/tensorboard/           if TensorBoard is installed or required
<run.dir>/export/hf              the trained policy
<run.dir>/faults/                batches of bad updates, stacks of ranks that hung
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vapo_mcore.errors import ConfigError

_MARKER = ".vapo_mcore_run"
logger = logging.getLogger(__name__)


def export_folder(run_dir: str | Path) -> Path:
    """Where the trained policy goes."""
    return Path(run_dir) / "export" / "hf"


def critic_folder(run_dir: str | Path) -> Path:
    """Where the critic goes after value pretraining."""
    return Path(run_dir) / "critic_pretrained" / "hf"


def faults_folder(run_dir: str | Path) -> Path:
    """What a run that went wrong leaves for a person to look at."""
    return Path(run_dir) / "faults"


class RunDirectory:
    """Writers of one run; rank 0 alone has one."""

    def __init__(self, path: Path, *, tensorboard: bool) -> None:
        self.path = path
        self.samples = path / "samples"
        self.evaluations = path / "evaluations"
        self._metrics = open(path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (kept open for the run, closed in close())
        self._tensorboard = _TensorBoard(path / "tensorboard") if tensorboard else None

    @classmethod
    def create(cls, path: str | Path, *, clean: bool, config_yaml: str, tensorboard: bool | None) -> RunDirectory:
        """Make the directory and save the resolved config. Raises ConfigError if it is in use or cannot be made.

        ``tensorboard``: None = when installed, True = required, False = off.
        """
        path = Path(path)
        check_run_directory(path, clean=clean, tensorboard=tensorboard)
        _make_empty(path)
        try:
            (path / _MARKER).touch()
            (path / "samples").mkdir()
            (path / "evaluations").mkdir()
            (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
            return cls(path, tensorboard=_has_tensorboard() if tensorboard is None else tensorboard)
        except OSError as error:
            raise ConfigError(f"run.dir = {str(path)!r} cannot be written: {error}") from error

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one step. Undefined and non-finite numbers become null; the latter are named under ``metrics/nonfinite``."""
        clean = dict(row)
        nonfinite = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        for name in nonfinite:
            clean[name] = None
        if nonfinite:
            clean["metrics/nonfinite"] = nonfinite
        self._metrics.write(json.dumps(clean, allow_nan=False) + "\n")
        self._metrics.flush()
        if self._tensorboard is not None:
            self._tensorboard.write(clean)

    def write_samples(self, name: str, samples: Iterable[Mapping[str, Any]]) -> Path:
        """Write ``samples/<name>.jsonl``, one response a line."""
        path = self.samples / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        return path

    def close(self) -> None:
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def check_run_directory(path: str | Path, *, clean: bool, tensorboard: bool | None) -> None:
    """Raise ConfigError unless a run may use ``path``: it is new or empty, or holds a run and ``clean`` allows deleting it.

    Also refused: a place where no directory can be made, and ``tensorboard`` = True (required) where it is not installed.
    """
    path = Path(path)
    if tensorboard and not _has_tensorboard():
        raise ConfigError("run.tensorboard = true, but the package tensorboard is not installed; install it or set run.tensorboard to null")
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise ConfigError(f"run.dir = {str(path)!r} exists and is not a directory; give another run.dir")
        above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(f"run.dir = {str(path)!r} cannot be made: {str(above)!r} is not a directory that can be written to")
        in_use = path.exists() and any(path.iterdir())
        if in_use and not (path / _MARKER).is_file():
            raise ConfigError(
                f"run.dir = {str(path)!r} holds files that are not a run of vapo-mcore; nothing was touched, give another run.dir"
            )
    except OSError as error:
        raise ConfigError(f"run.dir = {str(path)!r} cannot be used: {error.strerror}") from error
    if in_use and not clean:
        raise ConfigError(f"run.dir = {str(path)!r} already holds a run; give another run.dir, or --clean to delete that run first")


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _make_empty(path: Path) -> None:
    try:
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir = {str(path)!r} cannot be made: {error}") from error


class _TensorBoard:
    """Scalars by step. A failure after the start only warns, once: a tracker never stops training."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path))
        self._broken = False

    def write(self, row: Mapping[str, Any]) -> None:
        if self._broken:
            return
        stage, step = row.get("stage", "rl"), row["step"]
        prefix = "" if stage == "rl" else f"{stage}/"
        try:
            for name, value in row.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                    self._writer.add_scalar(prefix + name, value, step)
            self._writer.flush()
        except Exception as error:  # noqa: BLE001 (any fault of a tracker is its own)
            self._broken = True
            logger.warning("TensorBoard failed and is switched off for the rest of the run: %s", error)

    def close(self) -> None:
        if not self._broken:
            self._writer.close()
