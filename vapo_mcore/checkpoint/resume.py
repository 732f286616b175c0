"""Resume a run: choose an intact checkpoint, and load models, state and random generators on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vapo_mcore import checkpoint_files as files
from vapo_mcore.checkpoint import state
from vapo_mcore.checkpoint.models import OptimizerFormat, inspect, load_optimizer, load_weights
from vapo_mcore.checkpoint_files import OPTIMIZER, WEIGHTS, Manifest
from vapo_mcore.collectives import broadcast_object, fail_together
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models, refresh_critic

Say = Callable[[str], None]
_SAME_FOR_SHARDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True)
class ResumeOptions:
    """Options of ``train --resume``.

    Attributes:
        checkpoint: name of the checkpoint to resume from; None: the newest intact one.
        allow_config_change: accept configuration changes that affect what is learned.
        restart_data: restart the training prompts instead of continuing where the checkpoint stopped.
    """

    checkpoint: str | None = None
    allow_config_change: bool = False
    restart_data: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been verified."""

    path: Path
    manifest: Manifest


def choose(run_dir: str, name: str | None, say: Say) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run (or the named one), None if the run has none. A collective; ranks share the reading.

    Prints a warning for a damaged checkpoint and tries the one before. Raises CheckpointError if the named one is missing or damaged, or
    if all checkpoints are damaged.
    """
    candidates = broadcast_object([path.name for path in files.list_checkpoints(run_dir)])
    if name is not None:
        files.require_named(run_dir, name, candidates)
        candidates = [name]
    damaged = []
    for candidate in reversed(candidates):
        path = files.checkpoints_folder(run_dir) / candidate
        manifest, faults = inspect(path)
        if manifest is not None and not faults:
            return Checkpoint(path, manifest)
        shown = "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
        if name is not None:
            raise CheckpointError(f"checkpoint {path} is damaged: {shown}")
        damaged.append(candidate)
        say(f"warning: checkpoint {path} is damaged and is not used: {shown}")
    if damaged:
        raise CheckpointError(
            f"all checkpoints of {run_dir!r} are damaged ({', '.join(reversed(damaged))}), so the run cannot be resumed; repair one, or "
            "start the run again with --clean"
        )
    return None


def leave_newer(run_dir: str, chosen: Checkpoint, say: Say) -> None:
    """Rename checkpoints newer than the chosen one, which are damaged or belong to the abandoned steps. Rank 0 only."""
    for path in files.list_checkpoints(run_dir):
        if files.order(path.name) > files.order(chosen.path.name):
            say(f"checkpoint {path.name} is newer than the one the run resumes from; renamed to {files.set_aside(path).name}")


def load_models(config: Config, models: Models, checkpoint: Checkpoint) -> None:
    """Load weights, optimizers and schedules of policy and critic. A collective.

    Raises CheckpointError if the checkpoint has other models or optimizer state that cannot be loaded at this layout.
    """
    manifest = checkpoint.manifest
    if manifest.stage == "rl":
        refresh_critic(config, models)  # the RL stage uses a fresh critic optimizer
    present = {"policy": models.policy} | ({} if models.critic is None else {"critic": models.critic})
    if present.keys() != manifest.updates.keys():
        raise CheckpointError(
            f"{checkpoint.path} holds {' and '.join(manifest.updates)}, the configuration trains {' and '.join(present)}; resume with the "
            "estimator of the run"
        )
    _require_loadable(checkpoint, {role: model.parallel for role, model in present.items()}, models.policy.layers)
    form: OptimizerFormat = manifest.optimizer_format  # type: ignore[assignment]
    for role, model in present.items():
        models.residency.enter("policy_update" if role == "policy" else "critic_update")
        load_weights(model, checkpoint.path / role / WEIGHTS)
        if manifest.has_optimizer(role):
            unscheduled = manifest.unscheduled_updates.get(role, 0)
            load_optimizer(model, checkpoint.path / role / OPTIMIZER, form, manifest.updates[role], unscheduled_updates=unscheduled)
        models.residency.mark_changed(role)
    models.residency.enter("generate")


def _require_loadable(checkpoint: Checkpoint, layouts: Mapping[str, ParallelContext], layers: str) -> None:
    """Raise CheckpointError for optimizer shards of another layout or of layers with another order of parameters.

    ``dp_reshardable`` stores buffers as they are in memory: Megatron would load them into the wrong parameters, without an error.
    """
    manifest = checkpoint.manifest
    if manifest.is_reshardable:
        return
    different = _different_degrees(manifest, layouts)
    what, old = "at another layout", "at the old layout"
    if not different and manifest.layers and manifest.layers != layers:
        kinds = {
            "te": "model.attention = te",
            "te_grouped": "model.attention = te, grouped experts",
            "local": "model.attention = sdpa or varlen",
        }
        different, what, old = [f"{kinds[manifest.layers]} -> {kinds[layers]}"], "with other layers", f"with {kinds[manifest.layers]}"
    if not different:
        return
    other = [path.name for path in files.list_checkpoints(checkpoint.path.parent.parent) if _is_reshardable(path)]
    way = f"resume from {other[-1]} with --resume-from {other[-1]}" if other else "nor can any other checkpoint of the run"
    raise CheckpointError(
        f"{checkpoint.path} holds optimizer state that cannot be loaded {what} ({', '.join(different)}); {way}, or resume {old}, "
        "with checkpoint.reshardable_every=1, and let it save once"
    )


def _different_degrees(manifest: Manifest, layouts: Mapping[str, ParallelContext]) -> list[str]:
    """List the degrees of saved optimizer shards that differ from those of the models; a difference of both models is listed once."""
    found: list[str] = []
    for role, parallel in layouts.items():
        saved = manifest.layout_of(role)
        for name in _SAME_FOR_SHARDS if manifest.has_optimizer(role) else ():
            before, now = saved.get(name), getattr(parallel, name) or 1  # older checkpoints have no degrees of experts
            change = f"{name} {before} -> {now}"
            if before is not None and before != now and change not in found:
                found.append(change if role == "policy" else f"{change} of the critic")
    return found


def _is_reshardable(path: Path) -> bool:
    try:
        return Manifest.read(path).is_reshardable
    except CheckpointError:
        return False


def load_state(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the state besides the models, on every rank."""
    with fail_together():
        try:
            text, tensors = ((checkpoint.path / name).read_bytes() for name in ("state.json", "state.safetensors"))
        except OSError as error:
            raise CheckpointError(f"{checkpoint.path}: the state cannot be read: {error}") from error
        found = state.decode(text, tensors)
        if not isinstance(found, dict):
            raise CheckpointError(f"{checkpoint.path / 'state.json'} holds no state")
    return found


def load_parts(checkpoint: Checkpoint, replicas: Sequence[int]) -> list[dict[str, Tensor]]:
    """Read the tokens of the open responses that these replicas of the saved run held. Collective; ranks may read different ones."""
    found = []
    with fail_together():
        for replica in replicas:
            path = checkpoint.path / state.PARTS / state.part_name(replica)
            try:
                found.append(state.decode_part(path.read_bytes()))
            except OSError as error:
                raise CheckpointError(f"{path}: the open responses cannot be read: {error}") from error
    return found


def restore_random(checkpoint: Checkpoint, rank: int) -> None:
    """Restore this rank's random generators. A rank that the saved run did not have keeps its freshly seeded ones."""
    path = checkpoint.path / "rng" / f"rank_{rank:05d}.safetensors"
    with fail_together():
        if path.is_file():
            state.restore_random_state(path.read_bytes())
