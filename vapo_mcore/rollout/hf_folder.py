"""Properties of a Hugging Face model folder that the rollout engines need: stop tokens, parameter shapes, supported lengths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.errors import CheckpointError, ConfigError


def stop_token_ids(folder: str | Path, *, required: bool = True) -> tuple[int, ...]:
    """Return the sorted ids that end a response: ``eos_token_id`` of ``generation_config.json``, else of ``config.json``.

    Raises CheckpointError if it is ``required`` and missing: responses could then end only at the length limit.
    """
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(Path(folder) / name).get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
            return tuple(sorted(set(ids)))
    if not required:
        return ()
    raise CheckpointError(f"{folder}: no eos_token_id in generation_config.json or config.json, so responses could never end; add one")


def parameter_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return HF name -> shape of the tensors in the folder, from the transformers model on the meta device; a tied head has no entry."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    return {name: tuple(part.shape) for whole, parameter in parameters.items() for name, part in file_tensors(whole, parameter).items()}


def file_tensors(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return views of a parameter of transformers by the names of Hugging Face files, which hold the experts of a mixture one by one.

    transformers stacks them into ``gate_up_proj`` [experts, 2 x size, hidden] and ``down_proj`` [experts, hidden, size].
    """
    match = _STACKED_EXPERTS.fullmatch(name)
    if match is None:
        return {name: parameter}
    experts, kind = match.groups()
    if kind == "down_proj":
        return {f"{experts}.{number}.down_proj.weight": part for number, part in enumerate(parameter.detach())}
    halves = [(number, part.chunk(2)) for number, part in enumerate(parameter.detach())]
    named = [{f"{experts}.{number}.gate_proj.weight": gate, f"{experts}.{number}.up_proj.weight": up} for number, (gate, up) in halves]
    return {name: part for pair in named for name, part in pair.items()}


_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def require_supported(folder: str | Path, max_model_len: int) -> ModelArchitecture:
    """Return the architecture. Raises ConfigError if its positions end before ``max_model_len`` tokens."""
    architecture = read_architecture(folder)
    if max_model_len > architecture.max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length + rollout.max_response_length = {max_model_len} exceeds max_position_embeddings = "
            f"{architecture.max_position_embeddings} of {folder}; shorten one of them"
        )
    return architecture


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
