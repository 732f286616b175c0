"""Checkpoint folders: names, manifest, atomic publishing, verification, listing and retention. Does not import torch.

<run.dir>/checkpoints/<stage>_NNNNNN/
    manifest.json      step, stage, format, layout, package version, metrics of the step; size and SHA-256 of every other file
    config.yaml        the run's configuration
    state.json, state.safetensors     state equal on all ranks: counters, data cursors, ...
    rng/rank_NNNNN.safetensors        random generators of each rank
    policy/weights, policy/optimizer, critic/weights, critic/optimizer      Megatron distributed checkpoints

A save is written to ``.incomplete-<name>`` and renamed when complete.
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
"""Version of the folder format; a package reads all versions up to its own."""

Stage = Literal["value_pretraining", "rl"]
_PREFIXES: dict[Stage, str] = {"value_pretraining": "value_pretraining", "rl": "step"}
_NAME = re.compile(r"(value_pretraining|step)_(\d{6,})")
_INCOMPLETE = ".incomplete-"
_ASIDE = ".set_aside"
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint's ``manifest.json``.

    Attributes:
        stage, step: the checkpoint holds the state after this step of this stage.
        optimizer_format: format of the optimizer folders, see ``checkpoint.models``.
        updates: scheduled optimizer updates of each model with an optimizer.
        layout: parallel degrees it was saved with; ``critic_layout``: of the critic, None if it shares the policy's.
        metrics: numbers of the step's row, for ``keep_best`` and for inspection.
        files: relative path -> (bytes, SHA-256).
        unscheduled_updates: unscheduled optimizer updates (self-imitation) of the same models. Absent, meaning 0, in checkpoints written
            before they were counted.
        layers: ``te`` or ``local`` (``megatron.model.layer_kind``); empty in checkpoints written before it was recorded.
        number: of this checkpoint among those of the run, from 1, over all resumes; 0 in checkpoints written before they were counted.
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
    unscheduled_updates: dict[str, int] = field(default_factory=dict)
    layers: str = ""
    critic_layout: dict[str, int] | None = None
    number: int = 0

    def layout_of(self, role: str) -> dict[str, int]:
        """Return the degrees that a model was saved with."""
        return self.critic_layout if role == "critic" and self.critic_layout is not None else self.layout

    def has_optimizer(self, role: str) -> bool:
        """Return whether the model's optimizer is saved, that is, whether it has made any update."""
        return self.updates[role] + self.unscheduled_updates.get(role, 0) > 0

    @property
    def is_reshardable(self) -> bool:
        """Return whether it loads at any layout: its optimizer state was gathered, or it has none."""
        return self.optimizer_format == "fully_reshardable" or not any(map(self.has_optimizer, self.updates))

    @property
    def name(self) -> str:
        return checkpoint_name(self.stage, self.step)

    def write(self, folder: Path) -> None:
        write_durably(folder / MANIFEST_NAME, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of ``folder``. Raises CheckpointError if it is missing, damaged or of a newer format."""
        try:
            content = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
            version = content["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{folder} has format version {version}, written by vapo-mcore {content.get('package_version')}; this package reads up "
                    f"to {FORMAT_VERSION}: use a newer package"
                )
            if "aside_updates" in content:  # the name in checkpoints of early 0.1 versions
                content["unscheduled_updates"] = content.pop("aside_updates")
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
    """Return the sort key of a checkpoint's name; value pretraining comes before the RL steps."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1] == "step"), int(match[2])


def saved_weights(path: str | Path, role: str) -> Path | None:
    """Return the weights folder of one model in a run's checkpoint, or None if ``path`` is not such a checkpoint.

    Raises CheckpointError if the checkpoint lacks that model.
    """
    path = Path(path)
    if not (path / MANIFEST_NAME).is_file():
        return None
    if not (path / role / WEIGHTS).is_dir():
        raise CheckpointError(f"{path} is a checkpoint of a run without a {role}; it holds {', '.join(Manifest.read(path).updates)}")
    return path / role / WEIGHTS


def model_folder(path: str | Path, role: str) -> Path:
    """Return the folder with a model's config.json: ``path`` itself if it is a Hugging Face folder, else the one in the checkpoint."""
    weights = saved_weights(path, role)
    return Path(path) if weights is None else weights / HF


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Return the published checkpoints of a run, oldest first."""
    folder = checkpoints_folder(run_dir)
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)), key=lambda path: order(path.name))


def require_named(run_dir: str | Path, name: str, found: Sequence[str]) -> None:
    """Raise CheckpointError unless ``name`` is among ``found``, the names of the run's checkpoints."""
    if name not in found:
        raise CheckpointError(f"{checkpoints_folder(run_dir)} has no checkpoint {name!r}; there are: {', '.join(found) or 'none'}")


def incomplete(run_dir: str | Path, name: str) -> Path:
    """Return the folder in which a checkpoint is written before it is published."""
    return checkpoints_folder(run_dir) / f"{_INCOMPLETE}{name}"


def remove_leftovers(run_dir: str | Path) -> None:
    """Delete leftovers of interrupted saves and deletions."""
    folder = checkpoints_folder(run_dir)
    for path in folder.glob(f"{_INCOMPLETE}*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Rename a completely written folder to its final name; durable on return."""
    destination = temporary.parent / manifest.name
    if destination.exists():  # from steps that were abandoned by resuming from an older checkpoint
        set_aside(destination)
    for folder, _, _ in os.walk(temporary):
        sync_path(Path(folder))
    temporary.rename(destination)
    sync_path(destination.parent)
    return destination


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is damaged or belongs to abandoned steps, so that it is ignored; returns its new path."""
    target = path.with_name(path.name + _ASIDE)
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}{_ASIDE}{number}")
    path.rename(target)
    return target


def delete(path: Path) -> None:
    """Rename, then delete a checkpoint, so that an interruption leaves no partial one under its name. Raises OSError on failure."""
    doomed = path.with_name(_INCOMPLETE + path.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def faults_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the faults of the named files: missing, wrong size or wrong contents."""
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
                        faults.append(f"{name} has changed since it was written (SHA-256 differs)")
            except OSError as error:
                faults.append(f"{name} cannot be read: {error}")
    return faults


def _sha256(stream: BinaryIO) -> str:
    """Hash the rest of a large file; updates the heartbeat for each piece, since reading a checkpoint may take long."""
    digest = hashlib.sha256()
    while piece := stream.read(_PIECE_BYTES):
        digest.update(piece)
        heartbeat.alive()
    return digest.hexdigest()


def to_delete(found: Mapping[str, Manifest], *, keep_last: int, keep_best: int, best_metric: str | None) -> list[str]:
    """Return the names to delete from checkpoints listed oldest first.

    Keeps the last, those with the highest ``best_metric`` (of equal ones the newer), and the newest that loads at any layout.
    """
    names = list(found)
    kept = {*names[-keep_last:], *[name for name in names if found[name].is_reshardable][-1:]}
    if keep_best and best_metric is not None:
        scored = [
            (found[name].metrics[best_metric], number, name) for number, name in enumerate(names) if best_metric in found[name].metrics
        ]
        kept |= {name for _, _, name in sorted(scored)[-keep_best:]}
    return [name for name in names if name not in kept]


def require_space(folder: Path, num_bytes: int, free: Callable[[Path], int] | None = None) -> None:
    """Raise CheckpointError unless ``num_bytes`` and 1 % for metadata fit on the disk of ``folder``."""
    available = shutil.disk_usage(folder).free if free is None else free(folder)
    needed = num_bytes + num_bytes // 100 + (1 << 20)
    if needed > available:
        raise CheckpointError(
            f"no space for a checkpoint: {folder} has {available / 1e9:.2f} GB free, it takes {needed / 1e9:.2f} GB; nothing was written, "
            "existing checkpoints are kept"
        )


def write_durably(path: Path, data: bytes) -> tuple[int, str]:
    """Write and fsync a new file; returns its size and SHA-256."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return len(data), hashlib.sha256(data).hexdigest()


def seal(path: Path) -> tuple[int, str]:
    """Fsync a small file; returns its size and SHA-256."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def sync_path(path: Path) -> None:
    """Fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
