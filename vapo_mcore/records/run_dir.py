"""The run directory: made once by rank 0, never reused without ``--resume`` or ``--clean``, and only deleted if it is one of ours.

<run.dir>/config.yaml            the resolved configuration
<run.dir>/engine.json            what the rollout engine of the last start ran with
<run.dir>/metrics.jsonl          one JSON object a step
<run.dir>/samples/step_NNNN.jsonl   sampled responses with their scores
<run.dir>/evaluations/step_NNNN.json, .md   results on the evaluation sets
<run.dir>/tensorboard/, wandb/    of the trackers (trackers.py)
<run.dir>/checkpoints/           see docs/checkpoints.md
<run.dir>/export/hf              the trained policy
<run.dir>/best_hf                the best policy by an evaluation, see best_export.py
<run.dir>/dumps/                 rollouts of single steps, see step_dump.py
<run.dir>/faults/                batches of bad updates, stacks of ranks that hung
<run.dir>/finished.json          once the run has reached its end
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vapo_mcore.errors import CheckpointError, ConfigError, RecordError
from vapo_mcore.records.dumps import dumps_folder
from vapo_mcore.records.trackers import Trackers

LOCK_NAME = ".lock"
_MARKER = ".vapo_mcore_run"
_FINISHED = "finished.json"


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

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = run_id(path)
        self.samples = path / "samples"
        self.evaluations = path / "evaluations"
        # Unbuffered: what a full disk did not take must not be written later.
        self._metrics = open(path / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115 (kept open for the run, closed in close())
        self._last_row = 0  # where the row last written begins
        self.trackers = Trackers({})  # that show the rows too

    @classmethod
    def create(cls, path: str | Path, *, clean: bool, config_yaml: str) -> RunDirectory:
        """Make the directory and save the resolved config. Raises ConfigError if it is in use or cannot be made."""
        path = Path(path)
        check_run_directory(path, clean=clean)
        _make_empty(path)
        try:
            (path / _MARKER).write_text(json.dumps({"run_id": uuid.uuid4().hex}) + "\n", encoding="utf-8")
            (path / "samples").mkdir()
            (path / "evaluations").mkdir()
            (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
            return cls(path)
        except OSError as error:
            raise ConfigError(f"run.dir = {str(path)!r} cannot be written: {error}") from error

    @classmethod
    def resume(
        cls, path: str | Path, *, metrics_bytes: int, written: Collection[str], config_yaml: str, dumps: Collection[str] | None = None
    ) -> RunDirectory:
        """Take the directory back to what it was with ``metrics_bytes`` of metrics.jsonl, the ``written`` samples and evaluations and the
        ``dumps`` of steps (None: of a checkpoint that did not note them, so all are left).

        Later rows, samples, evaluations, dumps and exports go. Raises what :func:`check_position` raises.
        """
        path = Path(path)
        check_position(path, metrics_bytes=metrics_bytes, written=written, dumps=dumps)
        try:
            os.truncate(path / "metrics.jsonl", metrics_bytes)
            for file in _written(path):
                if file.relative_to(path).as_posix() not in written:
                    file.unlink()
            for dump in _dumps(path):
                if dumps is not None and dump.name not in dumps:
                    shutil.rmtree(dump)
            shutil.rmtree(path / "export", ignore_errors=True)
            (path / _FINISHED).unlink(missing_ok=True)
            (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
            return cls(path)
        except OSError as error:
            raise ConfigError(f"run.dir = {str(path)!r} cannot be written: {error}") from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """What metrics.jsonl holds so far."""
        with open(self.path / "metrics.jsonl", encoding="utf-8") as file:
            yield from map(json.loads, file)

    def position(self, *, without_last_row: bool = False) -> dict[str, Any]:
        """Where the files stand, for :meth:`resume`; the rows are on the disk when this returns.

        ``without_last_row``: :meth:`resume` shall take the row last written away, because it will be written again.
        Raises RecordError where the disk does not take the rows.
        """
        with _explained(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        written = sorted(file.relative_to(self.path).as_posix() for file in _written(self.path))
        dumps = sorted(dump.name for dump in _dumps(self.path))
        return {"metrics_bytes": self._last_row if without_last_row else self._metrics.tell(), "written": written, "dumps": dumps}

    def write_engine(self, settings: Mapping[str, Any]) -> None:
        """Record the rollout engine's settings, defaults resolved."""
        (self.path / "engine.json").write_text(json.dumps(settings, indent=1, default=str) + "\n", encoding="utf-8")

    def mark_finished(self, steps: int) -> None:
        """The run has reached its end after so many RL steps. Raises RecordError."""
        with _explained(self.path / _FINISHED):
            (self.path / _FINISHED).write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one step. Undefined and non-finite numbers become null; the latter are named under ``metrics/nonfinite``.

        Raises RecordError where the row cannot be written; the file then ends with the row before.
        """
        clean = {name: _finite_or_none(value) for name, value in row.items()}
        if self.trackers:
            clean["trackers/failed"] = self.trackers.failed
        nonfinite = [name for name, value in row.items() if clean[name] != value]  # a NaN differs from itself, and from None
        if nonfinite:
            clean["metrics/nonfinite"] = nonfinite
        start = self._metrics.tell()
        left = (json.dumps(clean, allow_nan=False) + "\n").encode()
        with _explained(self.path / "metrics.jsonl"):
            try:
                while left:
                    left = left[self._metrics.write(left) :]
            except OSError:
                self._metrics.truncate(start)
                self._metrics.seek(start)  # truncating does not move it, and position() tells where it stands
                raise
        self._last_row = start
        self.trackers.write(clean)

    def write_samples(self, name: str, samples: Iterable[Mapping[str, Any]]) -> Path:
        """Write ``samples/<name>.jsonl``, one response a line. Raises RecordError, and leaves no part of the file then."""
        path = self.samples / f"{name}.jsonl"
        with _explained(path):
            try:
                with open(path, "w", encoding="utf-8") as file:
                    file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
            except OSError:
                path.unlink(missing_ok=True)
                raise
        return path

    def close(self) -> None:
        self._metrics.close()
        self.trackers.close()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise RecordError for an error of the file system."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_position(path: str | Path, *, metrics_bytes: int, written: Collection[str], dumps: Collection[str] | None = None) -> None:
    """Raise CheckpointError unless the directory can be taken back to this position: what was written up to it is still there.

    Nothing is changed.
    """
    metrics = Path(path) / "metrics.jsonl"
    try:
        size = metrics.stat().st_size if metrics.is_file() else 0
        if size < metrics_bytes:
            raise CheckpointError(f"{metrics} has {size} bytes, the checkpoint was saved with {metrics_bytes}: rows are missing")
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics_bytes - 1))
            whole = metrics_bytes == 0 or stream.read(1) == b"\n"
    except OSError as error:
        raise CheckpointError(f"{metrics} cannot be read: {error.strerror}") from error
    if not whole:
        raise CheckpointError(
            f"{metrics} was changed after the checkpoint was saved: no row ends at byte {metrics_bytes}, where its last one did; put the "
            "file back as it was"
        )


def _written(path: Path) -> list[Path]:
    """Files of single steps."""
    return [file for folder in ("samples", "evaluations") for file in (path / folder).iterdir() if file.is_file()]


def _dumps(path: Path) -> list[Path]:
    """Folders of dumped steps."""
    folder = dumps_folder(path)
    return [dump for dump in folder.iterdir() if dump.is_dir()] if folder.is_dir() else []


def run_id(path: Path) -> str:
    """The identity of the run in a directory, the same after a resume."""
    try:
        return str(json.loads((path / _MARKER).read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def finished_steps(path: str | Path) -> int | None:
    """RL steps of a run that has reached its end; None of one that has not."""
    try:
        return int(json.loads((Path(path) / _FINISHED).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holds_run(path: str | Path) -> bool:
    """Whether a run has begun in the directory."""
    return (Path(path) / _MARKER).is_file()


def check_run_directory(path: str | Path, *, clean: bool, resume: bool = False) -> None:
    """Raise ConfigError unless a run may use ``path``: it is new or empty, or holds a run that ``clean`` allows to delete or ``resume``
    to continue. Also refused: a place where no directory can be made.
    """
    path = Path(path)
    try:
        places = (path, *path.absolute().parents)
        dangling = next((place for place in places if place.is_symlink() and not place.exists()), None)
        if dangling is not None:
            raise ConfigError(
                f"run.dir = {str(path)!r} cannot be made: {str(dangling)!r} is a symbolic link to {os.readlink(dangling)!r}, which does "
                "not exist; make that directory, or give another run.dir"
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run.dir = {str(path)!r} exists and is not a directory; give another run.dir")
        _check_writable(path, next(place for place in places if place.exists()))
        in_use = path.exists() and any(entry.name != LOCK_NAME for entry in path.iterdir())
        if in_use and not (path / _MARKER).is_file():
            raise ConfigError(
                f"run.dir = {str(path)!r} holds files that are not a run of vapo-mcore; nothing was touched, give another run.dir"
            )
    except OSError as error:
        raise ConfigError(f"run.dir = {str(path)!r} cannot be used: {error.strerror}") from error
    if in_use and not clean and not resume:
        raise ConfigError(
            f"run.dir = {str(path)!r} already holds a run; give --resume to continue it, another run.dir, or --clean to delete it first"
        )


def _check_writable(path: Path, above: Path) -> None:
    """Raise ConfigError unless a directory can be made in ``above``, the nearest place to ``path`` that exists."""
    if not above.is_dir():
        raise ConfigError(f"run.dir = {str(path)!r} cannot be made: {str(above)!r} is not a directory")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".vapo_mcore_try_", dir=above))  # permissions do not tell: /proc, read-only mounts, root
    except OSError as error:
        what = "be used" if above == path else "be made"
        raise ConfigError(
            f"run.dir = {str(path)!r} cannot {what}: no directory can be made in {str(above)!r}: {error.strerror}; give another run.dir"
        ) from error


def _make_empty(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            if entry.name == LOCK_NAME:
                continue  # this run holds it
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise ConfigError(f"run.dir = {str(path)!r} cannot be made: {error}") from error
