"""Architectures of published models, so that a run can be planned where its model folder is not: ``models/NAME.json``.

Each file holds the keys of the model's ``config.json`` that say what it is built of, and nothing else.
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
    """Names that :func:`find_architecture` knows."""
    return sorted(
        entry.name.removesuffix(".json") for entry in files(__package__).joinpath("models").iterdir() if entry.name.endswith(".json")
    )


def find_architecture(model: str) -> ModelArchitecture:
    """The architecture of a known model by name (case does not matter), of a ``config.json``, or of a model folder.

    Raises ConfigError naming the known models, or the reader's CheckpointError.
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
        raise ConfigError(f"{model!r} is no known model, file or folder; {hint}known: {', '.join(names)}; or give a config.json")
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
