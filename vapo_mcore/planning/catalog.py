"""Architectures of published models (``models/NAME.json``), to plan a run on a machine without its model folder.

Each file holds only those keys of the model's ``config.json`` that define its architecture.
"""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from vapo_mcore.config.architecture import ModelArchitecture, architecture_from_config, read_architecture
from vapo_mcore.errors import CheckpointError, ConfigError


def known_models() -> list[str]:
    """Return the names that :func:`find_architecture` accepts."""
    return sorted(
        entry.name.removesuffix(".json") for entry in files(__package__).joinpath("models").iterdir() if entry.name.endswith(".json")
    )


def find_architecture(model: str) -> ModelArchitecture:
    """Return the architecture of a known model (case-insensitive name), a ``config.json`` or a model folder.

    Raises ConfigError naming the known models, or CheckpointError if the file is invalid.
    """
    if os.path.isdir(model):
        return read_architecture(model)
    if os.path.isfile(model):
        return _read_file(Path(model))
    name = model.lower().removesuffix(".json")
    names = known_models()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{model!r} is not a known model, file or folder; {hint}known: {', '.join(names)}; or give a config.json")
    text = files(__package__).joinpath("models", f"{name}.json").read_text(encoding="utf-8")
    return architecture_from_config(json.loads(text), name)


def _read_file(path: Path) -> ModelArchitecture:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a config.json: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object")
    return architecture_from_config(raw, str(path))
