"""Compare a resumed run's configuration with the saved one, and reject changes that affect what is learned. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from vapo_mcore.config.loading import dump_yaml, models_in
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import CheckpointError, ConfigError

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
    "policy.optimizer.cpu_offload",
    "critic.optimizer.cpu_offload",
    "critic.parallel",
    "batch.max_tokens_per_microbatch",
    "rollout.vllm",
    "rollout.tensor_parallel_size",
    "rollout.verify_weights",
    "reward.workers",
    "reward.timeout_seconds",
)
"""Sections and keys that affect how, where or how long a run computes, but not what it learns. Some of them change rounding."""


@dataclass(frozen=True)
class Change:
    """One differing key with both values (None: absent).

    ``kind``: ``unsaved`` keys are not in the checkpoint, and ``before`` is their default; ``removed`` keys do not exist in this version.
    """

    key: str
    before: Any
    after: Any
    kind: Literal["changed", "unsaved", "removed"] = "changed"

    @property
    def harmless(self) -> bool:
        return any(self.key == name or self.key.startswith(f"{name}.") for name in HARMLESS)

    def __str__(self) -> str:
        if self.kind == "removed":
            return f"{self.key}: {self.before!r} -> this version has no such key"
        saved = f"{self.before!r} (the default; not in the checkpoint)" if self.kind == "unsaved" else repr(self.before)
        return f"{self.key}: {saved} -> {self.after!r}"


def changes(before: str, after: str) -> list[Change]:
    """Return the differences of two resolved configurations in YAML, by key.

    A key that ``before`` lacks, because it is newer or had no effect in that mode, is compared by its default (in the second case the
    key that selects the mode differs and is listed). A removed ``null`` is no difference.
    """
    try:
        old, new = yaml.safe_load(before), yaml.safe_load(after)
    except yaml.YAMLError as error:
        raise CheckpointError(f"the configuration in the checkpoint cannot be read: {error}") from error
    if not isinstance(old, dict) or not isinstance(new, dict):
        raise CheckpointError("the configuration in the checkpoint is not a mapping")
    saved, flat_new, completed = dict(_leaves(old)), dict(_leaves(new)), dict(_leaves(_completed(old, [Config])))
    found = []
    for key in dict.fromkeys([*saved, *flat_new]):
        value = flat_new.get(key)
        if key in saved:
            same = completed[key] == value if key in flat_new and key in completed else _is_empty(saved[key]) and _is_empty(value)
            if not same:
                found.append(Change(key, saved[key], value, "changed" if _known(key) else "removed"))
        elif key not in completed:  # its section was null, or there is no default
            if not _is_empty(value):
                found.append(Change(key, None, value))
        elif completed[key] != value:
            found.append(Change(key, completed[key], value, "unsaved"))
    return found


def _is_empty(value: Any) -> bool:
    return value is None or value == {}


_NONE: Any = object()


def _completed(value: Any, models: Sequence[type[BaseModel]]) -> Any:
    """Fill in the defaults of keys that ``value`` lacks; ``models``: the schema models that it, or its entries, may be instances of."""
    if isinstance(value, list):
        return [_completed(entry, models) for entry in value]
    model = next((model for model in models if _is_of(model, value)), None) if isinstance(value, dict) else None
    if model is None:
        return value
    complete: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        content = _completed(value[name], models_in(field.annotation)) if name in value else _default(field, complete)
        if content is not _NONE:
            complete[name] = content
    return complete | {name: content for name, content in value.items() if name not in complete}


def _is_of(model: type[BaseModel], value: Mapping[str, Any]) -> bool:
    """Return whether ``model`` matches the entry's ``kind``, or has no ``kind`` to match."""
    kind = model.model_fields.get("kind")
    return kind is None or not kind.is_required() or value.get("kind") in get_args(kind.annotation)


def _default(field: FieldInfo, before: dict[str, Any]) -> Any:
    """Return the default as in YAML, derived ones from the keys ``before`` it; ``_NONE`` if the key is required or cannot be derived."""
    if field.is_required():
        return _NONE
    try:
        return to_jsonable_python(field.get_default(call_default_factory=True, validated_data=before))
    except (AttributeError, KeyError, TypeError, ValueError):
        return _NONE


def _known(key: str) -> bool:
    """Return whether the schema has this key, or it lies in a user-defined mapping."""
    models: list[type[BaseModel]] = [Config]
    for name in key.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        if any(get_origin(field.annotation) is dict for field in fields):
            return True
        models = [model for field in fields for model in models_in(field.annotation)]
    return True


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, name)
        else:
            yield name, value


def compare_configs(config: Config, checkpoint: Path, *, allow: bool, say: Callable[[str], None]) -> None:
    """Print the differences to the saved configuration. Raises ConfigError for those that affect what is learned, unless allowed."""
    try:
        before = (checkpoint / "config.yaml").read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{checkpoint / 'config.yaml'} cannot be read: {error.strerror}") from error
    found = changes(before, dump_yaml(config))
    harmful = [change for change in found if not change.harmless]
    if harmful and not allow:
        lines = "\n".join(f"  {change}" for change in harmful)
        raise ConfigError(
            f"the configuration differs from the one saved in {checkpoint}, and these changes affect what is learned:\n{lines}\n"
            "revert them, or give --allow-config-change"
        )
    for change in found:
        say(f"configuration changed: {change}" + ("" if change.harmless else " (allowed by --allow-config-change)"))
