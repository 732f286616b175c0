"""Asynchronous saving of a run: schedule, snapshot, writer thread, publishing, retries, and deletion of old checkpoints.

A save has four stages, each on all ranks together. ``begin``, inside the step when the models are final and the rollout engine sleeps,
copies the models into host buffers. ``commit``, after the step, adds the remaining state and starts a writer thread. ``poll``, after
each later step, publishes the checkpoint once every rank has written. The next ``begin`` waits for a save in progress.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vapo_mcore import __version__, heartbeat
from vapo_mcore import checkpoint_files as files
from vapo_mcore.checkpoint import state
from vapo_mcore.checkpoint.models import FolderSave, ModelSaver, OptimizerFormat, check_steps
from vapo_mcore.checkpoint_files import HF, OPTIMIZER, WEIGHTS, Manifest, Stage
from vapo_mcore.collectives import all_gather_objects, broadcast_object, fail_together
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.weights.writer import copy_companions

LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass
class _Save:
    """A save in progress."""

    manifest: Manifest
    folder: Path
    folders: dict[str, FolderSave]
    written: dict[str, tuple[int, str]] = field(default_factory=dict)
    future: Future[None] | None = None


class Checkpointer:
    """Saves the models of a run and the state passed to ``commit``. Methods are collectives unless noted otherwise.

    Args:
        models: the models to save; the critic may be replaced between stages.
        say: prints on rank 0.
        resumed: manifest of the checkpoint that the run continues from; it counts as published, and checkpoints are counted from it.
    """

    def __init__(
        self,
        config: Config,
        parallel: ParallelContext,
        models: Models,
        say: Callable[[str], None],
        *,
        resumed: Manifest | None = None,
    ) -> None:
        self.config = config
        self.settings = config.checkpoint
        self.parallel = parallel
        self.models = models
        self.say = say
        self.failures = 0
        self.published: tuple[Stage, int] | None = None if resumed is None else (resumed.stage, resumed.step)
        self._saver = ModelSaver()
        self._critic: MegatronModel | None = models.critic
        self._pending: _Save | None = None
        self._begun: _Save | None = None
        self._last = time.monotonic()
        self.has_saved = False  # whether this process has published one
        self._number = 0 if resumed is None else resumed.number  # of the last published checkpoint
        self._retry_after: int | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    # ---------------------------------------------------------------------------------------------------------------- when

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step: by the step interval, by rank 0's clock, or to retry a failed save."""
        if self._retry_after is not None:
            self._retry_after -= 1
            if self._retry_after <= 0:
                return True
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        if every and step % every == 0:
            return True
        return bool(minutes) and broadcast_object(time.monotonic() - self._last >= 60 * minutes)

    def snapshot_if_due(self, stage: Stage, step: int, timer: PhaseTimer) -> None:
        """Take a snapshot after this step if one is due, or if the step is the run's last and ``checkpoint.at_end`` is set."""
        steps = self.config.run.steps
        last = step == (steps if stage == "rl" else self.config.critic.value_pretraining.max_steps)
        final = last and (stage == "rl" or steps == 0) and self.settings.at_end
        if self.is_due(step) or final:
            with timer.phase("checkpoint"):
                self.begin(stage, step, final=final)

    # -------------------------------------------------------------------------------------------------------------- saving

    def begin(self, stage: Stage, step: int, *, final: bool = False) -> None:
        """Take the models' snapshot. A failure (no space) is printed and counted, its files are removed, and the save is retried later."""
        self.wait()
        self._last = time.monotonic()
        self._retry_after = None
        every = self.settings.reshardable_every
        number = self._number + 1  # a failed save does not count: its retry has the same format
        reshardable = bool(every) and (final or number % every == 0)
        optimizers = {role: model.optimizer for role, model in self._models().items() if model.optimizer is not None}
        manifest = Manifest(
            stage=stage,
            step=step,
            optimizer_format="fully_reshardable" if reshardable else "dp_reshardable",
            updates={role: optimizer.updates for role, optimizer in optimizers.items()},
            unscheduled_updates={role: optimizer.unscheduled_updates for role, optimizer in optimizers.items()},
            layout=_layout_of(self.parallel),
            metrics={},
            package_version=__version__,
            layers=self._models()["policy"].layers,
            critic_layout=self._own_layout_of_critic(),
            number=number,
        )
        temporary = files.incomplete(self.config.run.dir, manifest.name)
        try:
            with fail_together():
                if self.parallel.rank == 0:
                    _make_folders(temporary, manifest)
            self._require_space(temporary)
            folders = self._snapshots(temporary, manifest)
        except CheckpointError as error:
            self._failed(manifest, temporary, str(error))
            return
        self._begun = _Save(manifest, temporary, folders)

    def commit(self, registry: Mapping[str, Any] | None, metrics: Mapping[str, Any], part: state.Part | None = None) -> None:
        """Add the state after the step and start writing; without ``checkpoint.asynchronous``, wait until it is published.

        ``registry``: plain values and tensors; rank 0's are saved. ``metrics``: the step's row. ``part``: state that only this rank has,
        saved under its name.
        """
        save, self._begun = self._begun, None
        if save is None:
            return
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and not isinstance(value, bool)}
        save.manifest = replace(save.manifest, metrics={name: value for name, value in numbers.items() if math.isfinite(value)})
        random_state = state.random_state()
        encoded = state.encode(registry) if self.parallel.rank == 0 else None
        save.future = self._writer.submit(self._write, save, random_state, encoded, part)
        self._pending = save
        if not self.settings.asynchronous:
            self.wait()

    def poll(self) -> None:
        """Publish the save in progress once every rank has written it; print a warning if it failed."""
        if self._pending is None:
            return
        save = self._pending
        assert save.future is not None
        if all(all_gather_objects(save.future.done())):
            self._settle(save)

    def wait(self) -> None:
        """Wait for the save in progress and publish it."""
        if self._pending is not None:
            assert self._pending.future is not None
            with heartbeat.entering("checkpoint"):
                self._pending.future.exception()
                self._settle(self._pending)

    @property
    def has_begun(self) -> bool:
        """Return whether a snapshot waits for ``commit``; equal on all ranks, not a collective."""
        return self._begun is not None

    @property
    def under_way(self) -> tuple[Stage, int] | None:
        """(stage, step) of the save that has begun and is not yet published; not a collective."""
        save = self._begun or self._pending
        return None if save is None else (save.manifest.stage, save.manifest.step)

    def close(self) -> None:
        """Wait for the writer thread and shut it down; not a collective."""
        self._writer.shutdown(wait=True)

    def release(self) -> None:
        """Free the host memory of snapshots after closing, in a process that continues."""
        self._saver.pool.clear()

    # ------------------------------------------------------------------------------------------------------------ internal

    def _models(self) -> dict[str, MegatronModel]:
        models = {"policy": self.models.policy}
        if self.models.critic is not None:
            models["critic"] = self.models.critic
        return models

    def _own_layout_of_critic(self) -> dict[str, int] | None:
        critic = self.models.critic
        return None if critic is None or critic.parallel is self.parallel else _layout_of(critic.parallel)

    def _snapshots(self, folder: Path, manifest: Manifest) -> dict[str, FolderSave]:
        """Take the snapshots model by model, with one model on the device at a time, as in an update."""
        if self.models.critic is not self._critic:
            self._saver.forget("critic")
            self._critic = self.models.critic
        form: OptimizerFormat = manifest.optimizer_format  # type: ignore[assignment]
        found = {}
        for role, model in self._models().items():
            self.models.residency.enter("policy_update" if role == "policy" else "critic_update")
            check_steps(model)
            found[f"{role}/{WEIGHTS}"] = self._saver.weights(model, folder / role / WEIGHTS)
            if manifest.has_optimizer(role):
                found[f"{role}/{OPTIMIZER}"] = self._saver.optimizer(model, folder / role / OPTIMIZER, form)
        return found

    def _require_space(self, folder: Path) -> None:
        """Check the free disk space against the total size of weights, main parameters and moments, before anything is written."""
        mine = 0
        for model in self._models().values():
            for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
                share = parameter.numel() / (model.parallel.data_parallel_size * model.parallel.context_parallel_size)
                mine += int(share * (parameter.element_size() + (12 if parameter.requires_grad else 0)))
        total = sum(all_gather_objects(mine))
        with fail_together():
            if self.parallel.rank == 0:
                files.require_space(folder, total)

    def _write(self, save: _Save, random_state: bytes, encoded: tuple[bytes, bytes] | None, part: state.Part | None) -> None:
        """Write this rank's files. Runs in the writer thread, so it must not call collectives."""
        for folder in save.folders.values():
            folder.write()
        rng = save.folder / "rng" / f"rank_{self.parallel.rank:05d}.safetensors"
        save.written[f"rng/{rng.name}"] = files.write_durably(rng, random_state)
        if part is not None:
            (save.folder / state.PARTS).mkdir(exist_ok=True)
            save.written[f"{state.PARTS}/{part.file_name}"] = files.write_durably(save.folder / state.PARTS / part.file_name, part.data)
        if encoded is None:
            return
        for name, data in (("state.json", encoded[0]), ("state.safetensors", encoded[1]), ("config.yaml", dump_yaml(self.config).encode())):
            save.written[name] = files.write_durably(save.folder / name, data)
        for role, model in self._models().items():
            companions = save.folder / role / WEIGHTS / HF
            source = self.config.critic.path if role == "critic" else None
            origin = files.model_folder(source or self.config.model.path, role)
            companions.mkdir()
            copy_companions(origin, companions, model.architecture, role=model.role, dtype=model.config.params_dtype)

    def _settle(self, save: _Save) -> None:
        self._pending = None
        assert save.future is not None
        error = save.future.exception()
        try:
            with fail_together():
                if isinstance(error, OSError):
                    raise CheckpointError(f"cannot write {save.folder}: {error.strerror or error}") from error
                if error is not None and not isinstance(error, CheckpointError):
                    raise CheckpointError(f"cannot write {save.folder}: {type(error).__name__}: {error}") from error
                if error is not None:
                    raise error
            for name, folder in save.folders.items():
                save.written |= {f"{name}/{file}": entry for file, entry in folder.finish().items()}
            written = {name: entry for part in all_gather_objects(save.written) for name, entry in part.items()}
            with fail_together():
                if self.parallel.rank == 0:
                    self._publish(save, written)
            self.published = (save.manifest.stage, save.manifest.step)
            self.has_saved = True
            self._number = save.manifest.number
            self.failures = 0
        except CheckpointError as fault:
            self._failed(save.manifest, save.folder, str(fault))

    def _publish(self, save: _Save, written: dict[str, tuple[int, str]]) -> None:
        """Write the manifest, publish by rename, delete checkpoints beyond the kept ones. Rank 0 only."""
        try:
            for path in sorted(path for path in save.folder.rglob("*") if path.is_file()):
                name = path.relative_to(save.folder).as_posix()
                if name not in written:
                    written[name] = files.seal(path)
            replace(save.manifest, files=dict(sorted(written.items()))).write(save.folder)
            files.publish(save.folder, save.manifest)
        except OSError as error:
            raise CheckpointError(f"cannot write {save.folder}: {error.strerror or error}") from error
        self.say(f"checkpoint saved: {files.checkpoints_folder(self.config.run.dir) / save.manifest.name}")
        self._writer.submit(self._keep)

    def _keep(self) -> None:
        """Delete old checkpoints, in the writer thread; failures are printed and retried after the next save."""
        settings = self.settings
        try:
            keep(self.config.run.dir, settings.keep_last, settings.keep_best, settings.best_metric)
        except OSError as error:
            self.say(f"warning: an old checkpoint could not be deleted: {error}")

    def _failed(self, manifest: Manifest, folder: Path, message: str) -> None:
        self.failures += 1
        self._retry_after = min(2 ** (self.failures - 1), 64)
        if self.parallel.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        steps = "step" if self._retry_after == 1 else f"{self._retry_after} steps"
        self.say(f"warning: checkpoint {manifest.name} failed: {message}; retrying after the next {steps}")


def _layout_of(parallel: ParallelContext) -> dict[str, int]:
    return {name: getattr(parallel, name) or 1 for name in LAYOUT}


def keep(run_dir: str, keep_last: int, keep_best: int, best_metric: str | None) -> None:
    """Delete checkpoints beyond ``keep_last``, ``keep_best`` and the newest that loads at any layout."""
    found = {}
    for path in files.list_checkpoints(run_dir):
        try:
            found[path.name] = Manifest.read(path)
        except CheckpointError:
            continue  # damaged: left for the user or the next resume
    for name in files.to_delete(found, keep_last=keep_last, keep_best=keep_best, best_metric=best_metric):
        files.delete(files.checkpoints_folder(run_dir) / name)


def _make_folders(folder: Path, manifest: Manifest) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "rng").mkdir(parents=True)
        for role in manifest.updates:
            (folder / role / WEIGHTS).mkdir(parents=True)
            if manifest.has_optimizer(role):
                (folder / role / OPTIMIZER).mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
