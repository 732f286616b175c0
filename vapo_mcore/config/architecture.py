"""What a Hugging Face model folder says about its architecture, read from ``config.json`` without importing torch.

One reader for everybody: the config checks (heads divisible by TP), the Megatron model builder, the mapping rules,
``plan`` and the rollout engines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vapo_mcore.errors import CheckpointError

_FAMILY_BY_MODEL_TYPE = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe"}
_KNOWN_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True)
class ModelArchitecture:
    """Architecture of a decoder-only model in the terms of its HF config; all sizes are whole-model, not per rank.

    ``head_dim`` is taken from the config where it is given and is not ``hidden_size // num_attention_heads`` then.
    ``rope_scaling`` is None or the llama3 scaling mapping with its HF keys.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_output_bias: bool
    qk_norm: bool
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    moe_ffn_hidden_size: int | None = None
    norm_topk_prob: bool = False

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None


def read_architecture(folder: str | Path) -> ModelArchitecture:
    """Read ``config.json`` of a HF model folder. Raises CheckpointError naming the folder, the key and what is supported."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise CheckpointError(f"model folder {str(folder)!r} does not exist; give a Hugging Face model folder with a config.json")
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is not a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object")
    return architecture_from_config(raw, str(path))


def architecture_from_config(raw: dict[str, Any], where: str = "config.json") -> ModelArchitecture:
    """Translate a parsed HF ``config.json``; ``where`` names the file in messages."""
    model_type = raw.get("model_type")
    family = _FAMILY_BY_MODEL_TYPE.get(str(model_type))
    if family is None:
        near = get_close_matches(str(model_type), _FAMILY_BY_MODEL_TYPE, n=1, cutoff=0.3)
        hint = f"; nearest supported: {near[0]!r}" if near else ""
        supported = ", ".join(sorted(_FAMILY_BY_MODEL_TYPE))
        raise CheckpointError(f"{where}: model_type {model_type!r} is not supported (supported: {supported}){hint}")
    moe = family == "qwen3_moe"
    required = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps"]
    if moe:
        experts_key = "num_local_experts" if "num_local_experts" in raw else "num_experts"  # transformers 5 and 4
        required += [experts_key, "num_experts_per_tok", "moe_intermediate_size"]
    bad = [f"{key} = {raw.get(key)!r}" for key in required if not _positive_number(raw.get(key))]
    if bad:
        raise CheckpointError(f"{where}: missing or not a positive number: {', '.join(bad)}")
    heads = int(raw["num_attention_heads"])
    kv_heads = raw.get("num_key_value_heads") or heads
    if not _positive_number(kv_heads) or heads % int(kv_heads):
        raise CheckpointError(f"{where}: num_key_value_heads = {kv_heads!r} must divide num_attention_heads = {heads}")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    _refuse_sliding_window(raw, family, where)
    if moe and (raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1):
        raise CheckpointError(
            f"{where}: mixtures of experts with some dense layers (mlp_only_layers, decoder_sparse_step) are not supported"
        )
    theta, scaling = _rope(raw, where)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelArchitecture(
        family=family,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=int(raw["hidden_size"]),
        ffn_hidden_size=int(raw["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(kv_heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        attention_output_bias=family != "qwen2" and attention_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=int(raw[experts_key]) if moe else None,
        num_experts_per_token=int(raw["num_experts_per_tok"]) if moe else None,
        moe_ffn_hidden_size=int(raw["moe_intermediate_size"]) if moe else None,
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )


def _positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _refuse_sliding_window(raw: dict[str, Any], family: str, where: str) -> None:
    """Sliding-window attention changes results silently where it is ignored, so an active window is refused."""
    active = raw.get("use_sliding_window", False) if family.startswith("qwen") else raw.get("sliding_window") is not None
    window, limit = raw.get("sliding_window"), raw.get("max_position_embeddings", 0)
    if active and window is not None and window < limit:
        raise CheckpointError(f"{where}: sliding_window = {window} below max_position_embeddings = {limit} is not supported")


def _rope(raw: dict[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta`` + ``rope_scaling`` (4)."""
    params = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(params.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _KNOWN_ROPE_TYPES:
        raise CheckpointError(f"{where}: rope scaling type {kind!r} is not supported (supported: {', '.join(_KNOWN_ROPE_TYPES)})")
    if kind == "default":
        return theta, None
    return theta, params
