"""Create, check and write the run directory. It is reused only with ``--resume`` or ``--clean``, and deleted only if it holds a run.

<run.dir>/config.yaml            resolved configuration
<run.dir>/engine.json            settings of the rollout engine at the last start
<run.dir>/metrics.jsonl          one JSON object per step
<run.dir>/samples/step_NNNN.jsonl   sampled responses with their scores
<run.dir>/evaluations/step_NNNN.json, .md   results on the evaluation sets
<run.dir>/tensorboard/, wandb/   files of the trackers (trackers.py)
<run.dir>/checkpoints/           see docs/checkpoints.md
<run.dir>/export/hf              trained policy
<run.dir>/best_hf                policy with the best evaluation score, see checkpoint/best_export.py
<run.dir>/dumps/                 rollouts of single steps, see step_dump.py
<run.dir>/faults/                batches of skipped updates, stacks of hung ranks
<run.dir>/finished.json          exists once the run has finished
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
from typing import TYPE_CHECKING, Any

from vapo_mcore.errors import CheckpointError, ConfigError, RecordError
from vapo_mcore.records.dumps import dumps_folder
from vapo_mcore.records.trackers import Trackers, start_trackers

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

LOCK_NAME = ".lock"
_MARKER = ".vapo_mcore_run"
_FINISHED = "finished.json"


def export_folder(run_dir: str | Path) -> Path:
    """Return the folder of the exported trained policy."""
    return Path(run_dir) / "export" / "hf"


def critic_folder(run_dir: str | Path) -> Path:
    """Return the folder of the critic saved after value pretraining."""
    return Path(run_dir) / "critic_pretrained" / "hf"


def faults_folder(run_dir: str | Path) -> Path:
    """Return the folder for files that explain a failure."""
    return Path(run_dir) / "faults"


class RunDirectory:
    """Writes the records of one run. Only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = run_id(path)
        self.samples = path / "samples"
        self.evaluations = path / "evaluations"
        # Unbuffered: bytes that a full disk refused must not be written later.
        self._metrics = open(path / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115 (kept open for the run, closed in close())
        self._last_row = 0  # byte offset of the last written row
        self.trackers = Trackers({})

    @classmethod
    def create(cls, path: str | Path, *, clean: bool, config_yaml: str) -> RunDirectory:
        """Create the directory and save the resolved config. Raises ConfigError if it is in use or cannot be created."""
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
        """Rewind the directory to a position: ``metrics_bytes`` of metrics.jsonl, the ``written`` samples and evaluations, the ``dumps``.

        Deletes later rows, samples, evaluations, dumps and exports. ``dumps`` None (from an old checkpoint) keeps all dumps. Raises like
        :func:`check_position`.
        """
        path = Path(path)
        check_position(path, metrics_bytes)
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
        """Yield the rows of metrics.jsonl."""
        with open(self.path / "metrics.jsonl", encoding="utf-8") as file:
            yield from map(json.loads, file)

    def position(self, *, without_last_row: bool = False) -> dict[str, Any]:
        """Flush the rows to disk and return the current position for :meth:`resume`.

        ``without_last_row``: exclude the last row, because a resumed run writes it again. Raises RecordError if the rows cannot be
        written.
        """
        with _explained(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        written = sorted(file.relative_to(self.path).as_posix() for file in _written(self.path))
        dumps = sorted(dump.name for dump in _dumps(self.path))
        return {"metrics_bytes": self._last_row if without_last_row else self._metrics.tell(), "written": written, "dumps": dumps}

    def start_trackers(self, config: Config) -> None:
        """Start the trackers of ``config`` and write the earlier rows of a resumed run to them."""
        self.trackers = start_trackers(config, self.path, self.run_id, self.rows)

    def write_engine(self, settings: Mapping[str, Any]) -> None:
        """Write the rollout engine's settings, including defaults, to engine.json."""
        (self.path / "engine.json").write_text(json.dumps(settings, indent=1, default=str) + "\n", encoding="utf-8")

    def mark_finished(self, steps: int) -> None:
        """Record that the run finished after ``steps`` RL steps. Raises RecordError."""
        with _explained(self.path / _FINISHED):
            (self.path / _FINISHED).write_text(json.dumps({"steps": steps}) + "\n", encoding="utf-8")

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step. Undefined and non-finite numbers become null; ``metrics/nonfinite`` lists the latter.

        Raises RecordError if the row cannot be written; the file then ends with the previous row.
        """
        clean = {name: _finite_or_none(value) for name, value in row.items()}
        if self.trackers:
            clean["trackers/failed"] = self.trackers.failed
        nonfinite = [name for name, value in row.items() if clean[name] != value]  # NaN differs from itself and from None
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
                self._metrics.seek(start)  # truncate() does not move the position, which position() returns
                raise
        self._last_row = start
        self.trackers.write(clean)

    def write_samples(self, name: str, samples: Iterable[Mapping[str, Any]]) -> Path:
        """Write ``samples/<name>.jsonl``, one response per line. Raises RecordError and then leaves no partial file."""
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
    """Convert an OSError to a RecordError."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_position(path: str | Path, metrics_bytes: int) -> None:
    """Raise CheckpointError unless metrics.jsonl still has the rows of its first ``metrics_bytes`` bytes. Changes nothing."""
    metrics = Path(path) / "metrics.jsonl"
    try:
        size = metrics.stat().st_size if metrics.is_file() else 0
        if size < metrics_bytes:
            raise CheckpointError(f"{metrics} has {size} bytes, but the checkpoint was saved at {metrics_bytes}: rows are missing")
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics_bytes - 1))
            whole = metrics_bytes == 0 or stream.read(1) == b"\n"
    except OSError as error:
        raise CheckpointError(f"{metrics} cannot be read: {error.strerror}") from error
    if not whole:
        raise CheckpointError(
            f"{metrics} was changed after the checkpoint was saved: no row ends at byte {metrics_bytes}, where the last row ended; restore "
            "the file"
        )


def _written(path: Path) -> list[Path]:
    """List the files of single steps."""
    return [file for folder in ("samples", "evaluations") for file in (path / folder).iterdir() if file.is_file()]


def _dumps(path: Path) -> list[Path]:
    """List the folders of dumped steps."""
    folder = dumps_folder(path)
    return [dump for dump in folder.iterdir() if dump.is_dir()] if folder.is_dir() else []


def run_id(path: Path) -> str:
    """Return the id of the run in a directory, which a resume keeps."""
    try:
        return str(json.loads((path / _MARKER).read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def finished_steps(path: str | Path) -> int | None:
    """Return the number of RL steps of a finished run, or None if it is not finished."""
    try:
        return int(json.loads((Path(path) / _FINISHED).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holds_run(path: str | Path) -> bool:
    """Return whether the directory holds a run."""
    return (Path(path) / _MARKER).is_file()


def check_run_directory(path: str | Path, *, clean: bool, resume: bool = False) -> None:
    """Raise ConfigError unless a run may use ``path``.

    It may if ``path`` can be created, is empty, or holds a run that ``clean`` may delete or ``resume`` may continue.
    """
    path = Path(path)
    try:
        places = (path, *path.absolute().parents)
        dangling = next((place for place in places if place.is_symlink() and not place.exists()), None)
        if dangling is not None:
            raise ConfigError(
                f"run.dir = {str(path)!r} cannot be created: {str(dangling)!r} is a symbolic link to {os.readlink(dangling)!r}, which does "
                "not exist; create that directory, or choose another run.dir"
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run.dir = {str(path)!r} exists and is not a directory; choose another run.dir")
        _check_writable(path, next(place for place in places if place.exists()))
        in_use = path.exists() and any(entry.name != LOCK_NAME for entry in path.iterdir())
        if in_use and not (path / _MARKER).is_file():
            raise ConfigError(
                f"run.dir = {str(path)!r} holds files that are not a run of vapo-mcore; nothing was changed, choose another run.dir"
            )
    except OSError as error:
        raise ConfigError(f"run.dir = {str(path)!r} cannot be used: {error.strerror}") from error
    if in_use and not clean and not resume:
        raise ConfigError(
            f"run.dir = {str(path)!r} already holds a run; continue it with --resume, choose another run.dir, or delete it with --clean"
        )


def _check_writable(path: Path, above: Path) -> None:
    """Raise ConfigError unless a directory can be created in ``above``, the closest existing parent of ``path``."""
    if not above.is_dir():
        raise ConfigError(f"run.dir = {str(path)!r} cannot be created: {str(above)!r} is not a directory")
    try:
        # Permission bits do not suffice: /proc, read-only mounts, root.
        os.rmdir(tempfile.mkdtemp(prefix=".vapo_mcore_try_", dir=above))
    except OSError as error:
        what = "be used" if above == path else "be created"
        raise ConfigError(
            f"run.dir = {str(path)!r} cannot {what}: cannot create a directory in {str(above)!r}: {error.strerror}; choose another run.dir"
        ) from error


def _make_empty(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            if entry.name == LOCK_NAME:
                continue  # held by this run
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise ConfigError(f"run.dir = {str(path)!r} cannot be created: {error}") from error
