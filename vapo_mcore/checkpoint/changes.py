"""What a resumed run's configuration may change: differences to the saved one, and which of them change what is learned. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from vapo_mcore.errors import CheckpointError

HARMLESS = (
    "run",
    "checkpoint",
    "export",
    "diagnosis",
    "faults.bad_updates_in_a_row",
    "faults.engine_rebuilds",
    "faults.grader_restarts",
    "faults.hang_minutes",
    "eval",
    "data.eval",
    "parallel",
    "model.attention",
    "model.recompute",
    "model.offload",
    "batch.max_tokens_per_microbatch",
    "rollout.vllm",
    "rollout.tensor_parallel_size",
    "rollout.verify_weights",
    "reward.workers",
    "reward.timeout_seconds",
)
"""Sections and keys that say how, where or how long a run computes, and not what it learns. Rounding may change with some of them."""


@dataclass(frozen=True)
class Change:
    """One differing key, with both values (``None``: not there)."""

    key: str
    before: Any
    after: Any

    @property
    def harmless(self) -> bool:
        return any(self.key == name or self.key.startswith(f"{name}.") for name in HARMLESS)

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


def changes(before: str, after: str) -> list[Change]:
    """Differences of two resolved configurations in YAML, by key."""
    try:
        old, new = yaml.safe_load(before), yaml.safe_load(after)
    except yaml.YAMLError as error:
        raise CheckpointError(f"the configuration in the checkpoint cannot be read: {error}") from error
    if not isinstance(old, dict) or not isinstance(new, dict):
        raise CheckpointError("the configuration in the checkpoint is not a mapping")
    flat_old, flat_new = dict(_leaves(old)), dict(_leaves(new))
    keys = list(dict.fromkeys([*flat_old, *flat_new]))
    return [Change(key, flat_old.get(key), flat_new.get(key)) for key in keys if flat_old.get(key) != flat_new.get(key)]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, name)
        else:
            yield name, value
