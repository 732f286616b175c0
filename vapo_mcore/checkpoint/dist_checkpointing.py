"""Version-independent ``save`` and ``load`` of ``megatron.core.dist_checkpointing``: 0.16 takes strategies for all I/O, 0.19 does not.

From 0.19.2 on, Megatron's ``load`` reads the rank-independent state itself, from metadata that it unpickles, and ``save`` stores it
among the sharded objects. ``load`` for these versions and ``save`` for all are reimplemented here from Megatron's building blocks, so that
every version writes the same folders, reads those of the others, and executes nothing from them. 0.16's ``save`` also writes
``common.pt`` between collectives, where a full disk on rank 0 would end the run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.host import import_megatron
from vapo_mcore.weights.distcp import common_file

import_megatron()
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import maybe_load_config  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import merge  # noqa: E402
from megatron.core.dist_checkpointing.mapping import apply_factory_merges  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper  # noqa: E402
from megatron.core.dist_checkpointing.utils import extract_sharded_base  # noqa: E402
from megatron.core.dist_checkpointing.validation import (  # noqa: E402
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)

HAS_STRATEGIES = find_spec("megatron.core.dist_checkpointing.strategies.base") is not None

if TYPE_CHECKING or HAS_STRATEGIES:
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
else:

    class AsyncSaveShardedStrategy:
        def __init__(self, backend: str, version: int) -> None:
            self.backend, self.version = backend, version

    class LoadShardedStrategy:
        pass

    class TorchCommonLoadStrategy:
        pass


def begin_save(
    state: dict[str, Any], folder: Path, strategy: FullyParallelSaveStrategyWrapper, *, validate: bool, content: Any
) -> tuple[AsyncRequest, bytes]:
    """Begin saving ``state``: return the strategy's request and the contents of ``common.pt``, which rank 0 must write. A collective.

    ``validate``: check that the ranks together save each part of each tensor exactly once (needed once per structure).
    """
    sharded, common = save_preprocess({**state, "content_metadata": content}, validate, None)
    return strategy.async_save(sharded, folder), common_file(common)


def load(
    state: dict[str, Any], folder: Path, sharded: LoadShardedStrategy, common: TorchCommonLoadStrategy
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Return (loaded state, keys stored but not requested, keys requested but not stored). A collective.

    Raises Megatron's CheckpointingException or ValueError on a mismatch, CheckpointError if the folder is not a checkpoint.
    """
    if HAS_STRATEGIES:
        return dist_checkpointing.load(state, str(folder), sharded, common, strict="return_all")
    config = maybe_load_config(str(folder))
    if config is None:
        raise CheckpointError(f"{folder} is not a distributed checkpoint")
    sharded.check_backend_compatibility(config.sharded_backend)
    sharded.check_version_compatibility(config.sharded_backend_version)
    result = common.load_common(folder)
    wanted, own, factories = load_preprocess(state)
    merge(result, own)
    wanted, _ = extract_sharded_base(wanted)
    stored = sharded.load_sharded_metadata(folder)
    wanted, surplus, missing = validate_integrity_and_strict_load(
        wanted, StrictHandling.RETURN_ALL, True, *determine_global_metadata(wanted), stored
    )
    merge(result, sharded.load(wanted, folder))
    return apply_factory_merges(result, factories), surplus, missing
