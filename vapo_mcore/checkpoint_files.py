"""Checkpoints as folders: their names, the manifest, publishing by one rename, checking, choosing, keeping. No torch here.

<run.dir>/checkpoints/<stage>_NNNNNN/
    manifest.json      step, stage, format, layout, package version, metrics of the step; size and SHA-256 of every other file
    config.yaml        the configuration that the run had
    state.json, state.safetensors     counters, cursors, whatever is the same on all ranks
    rng/rank_NNNNN.safetensors        the random generators of each rank
    policy/weights, policy/optimizer, critic/weights, critic/optimizer      Megatron distributed checkpoints

A save is written to ``.incomplete-<name>`` and renamed at the end: a folder with a proper name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from vapo_mcore import heartbeat
from vapo_mcore.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
WEIGHTS, OPTIMIZER, HF = "weights", "optimizer", "hf"
FORMAT_VERSION = 1
"""Of the folder as a whole; a package reads all versions up to its own."""

Stage = Literal["value_pretraining", "rl"]
_PREFIXES: dict[Stage, str] = {"value_pretraining": "value_pretraining", "rl": "step"}
_NAME = re.compile(r"(value_pretraining|step)_(\d{6,})")
_INCOMPLETE = ".incomplete-"
_ASIDE = ".set_aside"
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        stage, step: the state after that step of that stage.
        optimizer_format: of the optimizer folders, see ``checkpoint.models``.
        updates: optimizer updates of the schedule of each model that has an optimizer.
        layout: degrees of parallelism it was saved with.
        metrics: numbers of the step's row, for ``keep_best`` and for people.
        files: relative path -> (bytes, SHA-256).
        aside_updates: optimizer updates beside the schedule (self-imitation) of the same models. A checkpoint written before they
            were counted does not name them: 0.
    """

    stage: Stage
    step: int
    optimizer_format: str
    updates: dict[str, int]
    layout: dict[str, int]
    metrics: dict[str, float]
    package_version: str
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    aside_updates: dict[str, int] = field(default_factory=dict)

    def has_optimizer(self, role: str) -> bool:
        """Whether the model's optimizer is saved: it has made an update, of the schedule or beside it."""
        return self.updates[role] + self.aside_updates.get(role, 0) > 0

    @property
    def name(self) -> str:
        return checkpoint_name(self.stage, self.step)

    def write(self, folder: Path) -> None:
        write_durably(folder / MANIFEST_NAME, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError where it is missing, damaged, or of a later format."""
        try:
            content = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
            version = content["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{folder} has format version {version}, written by vapo-mcore {content.get('package_version')}; this one reads up to "
                    f"{FORMAT_VERSION}: use a newer package"
                )
            content["files"] = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
            manifest = cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / MANIFEST_NAME} cannot be read: {error}") from error
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{folder / MANIFEST_NAME} names {name!r}, which is not inside the checkpoint")
        return manifest


def checkpoint_name(stage: Stage, step: int) -> str:
    return f"{_PREFIXES[stage]}_{step:06d}"


def checkpoints_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def order(name: str) -> tuple[int, int]:
    """Sort key of a checkpoint's name: value pretraining comes before the RL steps."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1] == "step"), int(match[2])


def saved_weights(path: str | Path, role: str) -> Path | None:
    """The folder with the weights of one model of a run's checkpoint; None where ``path`` is no such checkpoint.

    Raises CheckpointError where it is one without that model.
    """
    path = Path(path)
    if not (path / MANIFEST_NAME).is_file():
        return None
    if not (path / role / WEIGHTS).is_dir():
        raise CheckpointError(f"{path} is a checkpoint of a run without a {role}; it holds {', '.join(Manifest.read(path).updates)}")
    return path / role / WEIGHTS


def model_folder(path: str | Path, role: str) -> Path:
    """The folder with config.json of a model: a Hugging Face folder itself, or what a checkpoint of a run has of it."""
    weights = saved_weights(path, role)
    return Path(path) if weights is None else weights / HF


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    folder = checkpoints_folder(run_dir)
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)), key=lambda path: order(path.name))


def require_named(run_dir: str | Path, name: str, found: Sequence[str]) -> None:
    """Raise CheckpointError unless ``name`` is among ``found``, the names of the run's checkpoints."""
    if name not in found:
        raise CheckpointError(f"{checkpoints_folder(run_dir)} has no checkpoint {name!r}; there are: {', '.join(found) or 'none'}")


def incomplete(run_dir: str | Path, name: str) -> Path:
    """Where a checkpoint is written before it is published."""
    return checkpoints_folder(run_dir) / f"{_INCOMPLETE}{name}"


def remove_leftovers(run_dir: str | Path) -> None:
    """Delete what interrupted saves and deletions have left."""
    folder = checkpoints_folder(run_dir)
    for path in folder.glob(f"{_INCOMPLETE}*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Give a completely written folder its name; durable when it returns."""
    destination = temporary.parent / manifest.name
    if destination.exists():  # of a future that this run has left by resuming from an older checkpoint
        set_aside(destination)
    for folder, _, _ in os.walk(temporary):
        sync_folder(Path(folder))
    temporary.rename(destination)
    sync_folder(destination.parent)
    return destination


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is damaged, or of a future that the run has left, so that it is neither chosen nor in the way."""
    target = path.with_name(path.name + _ASIDE)
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}{_ASIDE}{number}")
    path.rename(target)
    return target


def delete(path: Path) -> None:
    """Delete a checkpoint so that an interruption leaves no half of it under its name. Raises OSError for what cannot be deleted."""
    doomed = path.with_name(_INCOMPLETE + path.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def faults_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """What is wrong with the named files: missing, of another size, or of other contents."""
    faults = []
    for name in names:
        size, digest = manifest.files[name]
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != size:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        else:
            try:
                with path.open("rb") as stream:
                    if _sha256(stream) != digest:
                        faults.append(f"{name} has other contents than were written")
            except OSError as error:
                faults.append(f"{name} cannot be read: {error}")
    return faults


def _sha256(stream: BinaryIO) -> str:
    """Of the rest of a large file, with a sign of life for every piece: no step begins before all of a checkpoint is read."""
    digest = hashlib.sha256()
    while piece := stream.read(_PIECE_BYTES):
        digest.update(piece)
        heartbeat.alive()
    return digest.hexdigest()


def to_delete(found: Sequence[tuple[str, Mapping[str, float]]], *, keep_last: int, keep_best: int, best_metric: str | None) -> list[str]:
    """Names that go, of (name, metrics) oldest first: all but the last and the best by the highest ``best_metric`` (ties: the newer)."""
    kept = {name for name, _ in found[-keep_last:]}
    if keep_best and best_metric is not None:
        scored = [(metrics[best_metric], number, name) for number, (name, metrics) in enumerate(found) if best_metric in metrics]
        kept |= {name for _, _, name in sorted(scored)[-keep_best:]}
    return [name for name, _ in found if name not in kept]


def require_space(folder: Path, num_bytes: int, free: Callable[[Path], int] | None = None) -> None:
    """Raise CheckpointError where ``num_bytes`` and 1 % for metadata do not fit on the disk of ``folder``."""
    available = shutil.disk_usage(folder).free if free is None else free(folder)
    needed = num_bytes + num_bytes // 100 + (1 << 20)
    if needed > available:
        raise CheckpointError(
            f"no space for a checkpoint: {folder} has {available / 1e9:.2f} GB free, it takes {needed / 1e9:.2f} GB; nothing was written "
            "and the checkpoints that are there stay"
        )


def write_durably(path: Path, data: bytes) -> tuple[int, str]:
    """A new file that is on the disk when this returns; its size and SHA-256."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return len(data), hashlib.sha256(data).hexdigest()


def seal(path: Path) -> tuple[int, str]:
    """Have a small file on the disk; its size and SHA-256."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
