"""Save and load policy and critic as Megatron distributed checkpoints: one folder for the weights, one for the optimizer.

``weights`` loads at any layout and can be converted to Hugging Face (its subfolder ``hf`` holds config and tokenizer). ``optimizer``
(main parameters and both moments) has one of Megatron's two formats:

- ``dp_reshardable``: each rank writes its shard without gathering. Loads at the same TP, PP, virtual PP, EP and expert TP; DP and CP may
  differ.
- ``fully_reshardable``: gathered over data parallelism on save, by parameter. Loads at any layout.

An optimizer without any update is not saved, because its state follows from the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from vapo_mcore.checkpoint import dist_checkpointing
from vapo_mcore.checkpoint.strategies import EXTRA_STATE, SafeCommonLoad, SafeLoad, SnapshotSave
from vapo_mcore.checkpoint_files import OPTIMIZER, WEIGHTS, Manifest, faults_of, saved_weights, write_durably
from vapo_mcore.collectives import all_gather_objects, broadcast_object, fail_together, world
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.host import megatron_scope
from vapo_mcore.megatron.offload import HostPool
from vapo_mcore.megatron.optimizer import is_hybrid
from vapo_mcore.weights.distcp import COMMON_NAME

OptimizerFormat = Literal["dp_reshardable", "fully_reshardable"]


class FolderSave:
    """One save of one dist_checkpointing folder.

    Construction takes the snapshot, ``write`` runs in a thread, and ``finish`` (a collective) completes the folder.
    """

    def __init__(self, folder: Path, strategy: SnapshotSave, request: Any, common: bytes) -> None:
        self.folder = folder
        self.strategy = strategy
        self._request = request
        self._common = common
        self._written: dict[str, tuple[int, str]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank writes."""
        return self.strategy.num_bytes

    def write(self) -> None:
        """Write and fsync this rank's files. Raises OSError if that fails."""
        if world()[0] == 0:
            self._written[COMMON_NAME] = write_durably(self.folder / COMMON_NAME, self._common)
        self._request.async_fn(*self._request.async_fn_args)

    def finish(self) -> dict[str, tuple[int, str]]:
        """Complete the folder after all ranks have written; returns this rank's files: name -> (size, SHA-256).

        Runs only the first of the request's finalize functions: Megatron's last one writes ``metadata.json`` between collectives, where
        a full disk on one rank would leave the others waiting.
        """
        self._request.finalize_fns[0]()
        return self._written | self.strategy.written


class ModelSaver:
    """Takes snapshots of models into reused host buffers; caches Megatron's save plans."""

    def __init__(self) -> None:
        self.pool = HostPool()
        self._strategies: dict[tuple[str, str], tuple[SnapshotSave, Any]] = {}  # by owner and form

    def weights(self, model: MegatronModel, folder: Path) -> FolderSave:
        """Take a snapshot of the weights, to be written into ``folder``, which must exist on rank 0. A collective."""
        with model.parallel.scope():
            return self._save(model, WEIGHTS, weights_state(model.chunks), folder)

    def optimizer(self, model: MegatronModel, folder: Path, form: OptimizerFormat) -> FolderSave:
        """Take a snapshot of the optimizer's state, like :meth:`weights`."""
        with model.parallel.scope():
            return self._save(model, OPTIMIZER, optimizer_state(model, form, is_loading=False), folder, form)

    def forget(self, role: str) -> None:
        """Drop plans and buffers of a model that was rebuilt with new tensors."""
        for owner, form in [key for key in self._strategies if key[0].startswith(f"{role}/")]:
            del self._strategies[owner, form]
            self.pool.release(owner)

    def _save(self, model: MegatronModel, kind: str, state: Any, folder: Path, form: str = "") -> FolderSave:
        owner = f"{model.role}/{kind}"
        known = (owner, form) in self._strategies
        if not known:
            base = SnapshotSave(self.pool, owner)
            # Each data-parallel replica writes a part of the weights.
            group = model.parallel.data_context_parallel_group
            self._strategies[owner, form] = (
                base,
                dist_checkpointing.FullyParallelSaveStrategyWrapper(base, group, do_cache_distribution=True),
            )
        base, shared = self._strategies[owner, form]
        content = {"content": f"{owner}/{form}" if form else owner}
        request, common = dist_checkpointing.begin_save(state, folder, shared, validate=not known, content=content)
        return FolderSave(folder, base, request, common)


def weights_state(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return Megatron's sharded state of a model, by chunk."""
    return {f"chunk{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def optimizer_state(model: MegatronModel, form: OptimizerFormat, *, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's sharded state of main parameters and moments, by optimizer; empty on a rank without trained parameters."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    assert model.optimizer is not None
    experts = {id(buffer) for chunk in model.wrapped for buffer in chunk.expert_parallel_buffers}
    metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
    weights = weights_state(model.chunks) if form == "fully_reshardable" else {}
    state: dict[str, Any] = {}
    for number, optimizer in enumerate(_inner(model)):
        if form == "dp_reshardable":
            state[f"optimizer{number}"] = shards = optimizer.sharded_param_state_dp_reshardable({}, is_loading, metadata)
            _clear_padding(shards)
            if any(id(buffer) in experts for buffer in optimizer.buffers):  # Megatron's keys do not tell experts' groups from the others
                add_prefix_for_sharding(shards, "experts.")
        else:
            state[f"optimizer{number}"] = optimizer.sharded_param_state_fully_reshardable(weights, is_loading, metadata)
    return state


def _clear_padding(shards: dict[Any, Any]) -> None:
    """Zero the padding between parameters, which is saved too; Megatron leaves it uninitialised."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for buffers in (value for key, value in shards.items() if isinstance(key, int)):
        for buckets in buffers.values():
            for entry in (entry for bucket in buckets for entry in bucket if entry["padding"].unwrap()):
                for item in entry.values():
                    if isinstance(item, ShardedTensor):
                        item.data.zero_()


@torch.no_grad()
def fill_chunks(chunks: Sequence[Any], folder: str | Path) -> None:
    """Fill a model's chunks from a ``weights`` folder saved at any layout, in the scope of the model's layout. A collective.

    Raises CheckpointError on all ranks if a tensor is missing, unexpected, damaged or of the wrong shape.
    """
    with megatron_scope():
        loaded = _load(weights_state(chunks), folder)
        for number, chunk in enumerate(chunks):
            # Transformer Engine's norms have an extra state that Megatron does not save; without fp8 it is empty.
            kept = chunk.load_state_dict(loaded[f"chunk{number}"], strict=False)
            wrong = [key for key in (*kept.missing_keys, *kept.unexpected_keys) if not key.endswith(EXTRA_STATE)]
            if wrong:
                raise CheckpointError(f"{folder}: {len(wrong)} tensors do not belong to the model, or are missing: {', '.join(wrong[:5])}")


@torch.no_grad()
def load_weights(model: MegatronModel, folder: str | Path) -> None:
    """Load weights like :func:`fill_chunks`, and update the main parameters of the model's optimizer, if any."""
    with model.parallel.scope():
        fill_chunks(model.chunks, folder)
        if model.optimizer is not None:
            model.optimizer.megatron.reload_model_params()


@torch.no_grad()
def load_optimizer(model: MegatronModel, folder: str | Path, form: OptimizerFormat, updates: int, *, unscheduled_updates: int = 0) -> None:
    """Load an ``optimizer`` folder saved after ``updates`` scheduled and ``unscheduled_updates`` unscheduled updates.

    A collective; raises the same errors as :func:`load_weights`.
    """
    assert model.optimizer is not None
    with model.parallel.scope():
        for optimizer in _inner(model):
            _allocate(optimizer)
        loaded = _load(optimizer_state(model, form, is_loading=True), folder)
        for number, optimizer in enumerate(_inner(model)):
            with _without_step_counters(optimizer, updates + unscheduled_updates), _into_existing_tensors(optimizer):
                if form == "dp_reshardable":
                    optimizer.load_parameter_state_from_dp_reshardable(loaded[f"optimizer{number}"])
                else:
                    optimizer.load_parameter_state_from_fully_reshardable(loaded[f"optimizer{number}"])
    model.optimizer.set_updates(updates, unscheduled_updates)


def _inner(model: MegatronModel) -> list[Any]:
    """Return this rank's distributed optimizers that have parameters."""
    assert model.optimizer is not None
    found = [optimizer for optimizer in model.optimizer.megatron.chained_optimizers if not getattr(optimizer, "is_stub_optimizer", False)]
    for optimizer in found:
        _correct_positions(optimizer)
    return found


def _correct_positions(optimizer: Any) -> None:
    """Correct Megatron's map from model parameters to main parameters for models with some float32 parameters (a value head).

    The map follows the order of the parameters in their buffers, but the optimizer holds float32 model parameters first; without the
    correction, parameters would be saved and loaded with each other's state.
    """
    for number, group in enumerate(optimizer.opt_group_ranges):
        ordered = sorted(group["params"], key=lambda parameter: parameter.dtype != torch.float32)
        optimizer.model_param_group_index_map |= {parameter: (number, position) for position, parameter in enumerate(ordered)}


def _load(state: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Load ``state`` with ``dist_checkpointing.load``. Raises CheckpointError for missing and unexpected keys."""
    from megatron.core.dist_checkpointing.mapping import CheckpointingException

    # Megatron finishes its collectives before a rank reads its part, so a read error can be raised on all ranks.
    with fail_together():
        try:
            loaded, surplus, missing = dist_checkpointing.load(state, Path(folder), SafeLoad(), SafeCommonLoad())
        except (CheckpointingException, ValueError) as error:  # ValueError: mismatched keys found while it assembles tensors
            raise CheckpointError(f"{folder} does not match the model: {error}") from error
    faults = [
        f"{what}: {key}" for what, keys in (("missing", missing), ("surplus", surplus)) for key in sorted(keys) if EXTRA_STATE not in key
    ]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise CheckpointError(f"{folder} does not match the model: {shown}")
    return loaded


def _allocate(optimizer: Any) -> None:
    """Create the optimizer state that the first update would create, so that loading has tensors to fill."""
    if is_hybrid(optimizer.optimizer):
        for part in optimizer.optimizer.sub_optimizers:
            _allocate_adam(part)
        optimizer.optimizer._sync_sub_optimizers_state_to_hdo()
    elif not isinstance(optimizer.optimizer, torch.optim.Optimizer) or type(optimizer.optimizer).__module__.startswith("torch."):
        _allocate_adam(optimizer.optimizer)
    else:  # Apex or Transformer Engine: Megatron allocates the state
        optimizer.load_state_dict(optimizer.state_dict())


def _allocate_adam(adam: Any) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


@contextmanager
def _into_existing_tensors(optimizer: Any) -> Iterator[None]:
    """Copy what Megatron loads for a CPU optimizer into its existing state tensors.

    Megatron's loaders replace these tensors: with slices that keep whole parameters alive, with a main parameter other than the one that
    is updated, and in one format with bookkeeping entries for padding.
    """
    if not is_hybrid(optimizer.optimizer):
        yield
        return
    own = {parameter: dict(values) for parameter, values in optimizer.optimizer.state.items()}
    yield
    for parameter, values in own.items():
        loaded = optimizer.optimizer.state[parameter]  # shared with the inner optimizer, so modify it in place
        for key, value in values.items():
            value.copy_(loaded[key])
        loaded.clear()
        loaded.update(values)


@contextmanager
def _without_step_counters(optimizer: Any, all_updates: int) -> Iterator[None]:
    """Remove the step counters, which Megatron's loaders cannot handle, while loading; set them to ``all_updates`` afterwards.

    torch's Adam has one tensor per parameter (advanced in place, so not shared), Apex and Transformer Engine have one per group.
    """
    inner = optimizer.optimizer
    with_steps = [state for state in inner.state.values() if "step" in state]
    for state in with_steps:
        del state["step"]
    yield
    for state in with_steps:
        state["step"] = torch.tensor(float(all_updates))
    for group in inner.param_groups:
        if "step" in group or not with_steps:
            group["step"] = all_updates


def check_steps(model: MegatronModel) -> None:
    """Assert that the optimizer's step counters equal the scheduled plus unscheduled updates, from which loading restores them."""
    assert model.optimizer is not None
    for optimizer in _inner(model):
        steps = {int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state}
        assert steps <= {model.optimizer.all_updates}, (
            f"the {model.role}'s optimizer counts {steps} updates, but {model.optimizer.updates} scheduled and "
            f"{model.optimizer.unscheduled_updates} unscheduled ones were made"
        )


def inspect(path: Path, prefix: str = "") -> tuple[Manifest | None, list[str]]:
    """Return the manifest and the faults of the files below ``prefix``, equal on all ranks. A collective; each rank reads some files."""
    rank, size = world()
    found: Manifest | None = None
    faults: list[str] = []
    if rank == 0:
        try:
            found = Manifest.read(path)
        except CheckpointError as error:
            faults = [str(error)]
    manifest, faults = broadcast_object((found, faults))
    if manifest is None:
        return None, faults
    mine = sorted(name for name in manifest.files if name.startswith(prefix))[rank::size]
    return manifest, [fault for part in all_gather_objects(faults_of(path, manifest, mine)) for fault in part]


def require_intact(path: str | Path, role: str) -> Path:
    """Verify the files of one model in a run's checkpoint and return its weights folder. A collective.

    Raises CheckpointError naming the damaged files.
    """
    weights = saved_weights(path, role)
    assert weights is not None, f"{path} is not a checkpoint of a run"
    _, faults = inspect(Path(path), f"{role}/{WEIGHTS}/")
    if faults:
        raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(faults[:4])}")
    return weights
