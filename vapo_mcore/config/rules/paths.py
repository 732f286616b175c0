"""Check the folders and files named in a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vapo_mcore.checkpoint_files import model_folder
from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.config.layers import Fault
from vapo_mcore.config.references import is_file_reference, is_reference
from vapo_mcore.config.schema import Config, FileSource
from vapo_mcore.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_model(key: str, folder: str, faults: list[Fault]) -> ModelArchitecture | None:
    """Read the architecture of a model folder. Appends errors of the folder to ``faults``, at ``key``."""
    try:
        described = model_folder(folder, "critic" if key == "critic.path" else "policy") if key != "model.path" else Path(folder)
        architecture = read_architecture(described)
    except CheckpointError as error:
        faults.append(Fault(key, str(error)))
        return None
    if described != Path(folder):
        return architecture  # a checkpoint of a run: loading compares its files with its manifest
    if key == "policy.path":
        faults.append(Fault(key, f"{folder!r} is not a checkpoint of a run; use model.path for a Hugging Face folder"))
    if not any(Path(folder, name).is_file() for name in _WEIGHTS):
        pickled = sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in Path(folder).glob(f"*.{suffix}"))
        hint = f"; {pickled[0]} is a pickle, which could run code and is not loaded: convert it to safetensors" if pickled else ""
        faults.append(Fault(key, f"{folder!r} has no weights: neither {' nor '.join(_WEIGHTS)}{hint}"))
    if key == "model.path" and not any(Path(folder, name).is_file() for name in _TOKENIZERS):
        faults.append(Fault(key, f"{folder!r} has no tokenizer ({', '.join(_TOKENIZERS[:-1])} or {_TOKENIZERS[-1]})"))
    return architecture


def references(config: Config) -> Iterator[tuple[str, str]]:
    """Yield dotted key and reference of all custom code that the run imports."""
    if is_reference(config.rollout.engine):
        yield "rollout.engine", config.rollout.engine
    if config.rollout.environment is not None and is_reference(config.rollout.environment.name):
        yield "rollout.environment.name", config.rollout.environment.name
    advantage = config.algorithm.advantage
    if advantage.estimator == "custom" and advantage.custom is not None:
        yield "algorithm.advantage.custom.function", advantage.custom.function
    loss = config.algorithm.policy_loss
    if loss.kind == "custom" and loss.custom is not None:
        yield "algorithm.policy_loss.custom.function", loss.custom.function
    for index, term in enumerate(config.algorithm.loss_terms):
        yield f"algorithm.loss_terms.{index}.function", term.function
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, split)):
            for name in ("function", "verifier"):
                reference = getattr(source, name, None)
                if reference is not None and is_reference(reference):
                    yield f"data.{split}.{index}.{name}", reference


def missing_paths(config: Config) -> Iterator[Fault]:
    """Yield a fault for every missing data file and file with custom code."""
    here = f"(relative to {str(Path.cwd())!r})"
    for key, reference in references(config):
        file = reference.rpartition(":")[0]
        if is_file_reference(reference) and not os.path.isfile(file):
            yield Fault(key, f"no such file: {file!r} {here}")
    template = config.data.chat_template
    if isinstance(template, str) and not os.path.isfile(template):
        yield Fault("data.chat_template", f"no such file: {template!r} {here}; set true, false or the path of a Jinja template")
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, split)):
            if isinstance(source, FileSource) and not os.path.exists(source.path):
                yield Fault(f"data.{split}.{index}.path", f"no such file: {source.path!r} {here}")
