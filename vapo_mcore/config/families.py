"""Model families: one record per family holds everything that depends on the family's name.

A new dense family is an entry of :data:`FAMILIES`: what its ``config.json`` means (read by ``config.architecture``), what its layers
have (built by ``megatron.model``, counted by ``planning``) and which blocks of mapping rules its weights follow, by their names in
``weights.families.BLOCKS``. A block that no family has yet goes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_DENSE = ("embedding", "attention", "mlp_norm", "gated_mlp", "final_norm")


@dataclass(frozen=True)
class Family:
    """Attributes:
    hf_class: prefix of the classes in transformers: ``<prefix>ForCausalLM``, ``<prefix>ForTokenClassification``.
    blocks: mapping rules of the trunk; those of a bias apply where the model has one.
    qkv_bias: of the query, key and value projections; ``config``: as ``attention_bias`` says.
    output_bias: ``attention_bias`` adds one to the attention's output projection too.
    qk_norm: queries and keys are normalised by head.
    moe: a mixture of experts.
    unused_window: the config names a sliding window that is not used unless ``use_sliding_window``.
    rotary_percent: share of each head that is rotated, where the config does not say (``partial_rotary_factor``); None: all of it, always.
    rotary_interleaved: neighbouring elements are rotated together, not those of the two halves.
    """

    hf_class: str
    blocks: tuple[str, ...] = (*_DENSE, "qkv_bias", "output_bias")
    qkv_bias: Literal["config", "always"] = "config"
    output_bias: bool = True
    qk_norm: bool = False
    moe: bool = False
    unused_window: bool = False
    rotary_percent: float | None = None
    rotary_interleaved: bool = False


_EXPERTS = ("embedding", "attention", "qkv_bias", "output_bias", "qk_norm", "moe_norm", "moe_mlp", "final_norm")

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", _DENSE),
    "qwen2": Family("Qwen2", (*_DENSE, "qkv_bias"), qkv_bias="always", output_bias=False, unused_window=True),
    "qwen3": Family("Qwen3", (*_DENSE, "qkv_bias", "output_bias", "qk_norm"), qk_norm=True, unused_window=True),
    "qwen3_moe": Family("Qwen3Moe", _EXPERTS, qk_norm=True, moe=True, unused_window=True),
    "glm": Family(
        "Glm",
        ("embedding", "attention", "mlp_norm", "gate_up_mlp", "final_norm", "qkv_bias"),
        output_bias=False,
        rotary_percent=0.5,
        rotary_interleaved=True,
    ),
}
"""By ``model_type`` of the config."""
