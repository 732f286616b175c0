"""Properties of a Hugging Face model folder that the rollout engines need: stop tokens, parameter shapes, supported lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.errors import CheckpointError, ConfigError, RolloutError


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
    """Return HF name -> shape of all parameters, from the transformers model on the meta device. A tied output head has no entry."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def require_supported(folder: str | Path, max_model_len: int) -> ModelArchitecture:
    """Return the architecture; raises if weight sync or generation with ``max_model_len`` tokens does not support it."""
    architecture = read_architecture(folder)
    if architecture.is_moe:
        raise RolloutError(f"{folder}: weight sync of mixture-of-experts models is not supported yet")
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
