"""Model families: one record per family holds everything that depends on the family's name.

To add a dense family, add an entry to :data:`FAMILIES`. It defines the meaning of its ``config.json`` (read by ``config.architecture``),
the parts of its layers (built by ``megatron.model``, counted by ``planning``) and its blocks of mapping rules, by their names in
``weights.families.BLOCKS``. Add new blocks there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_DENSE = ("embedding", "attention", "mlp_norm", "gated_mlp", "final_norm")


@dataclass(frozen=True)
class Family:
    """Properties of a model family.

    Attributes:
        hf_class: prefix of the classes in transformers: ``<prefix>ForCausalLM``, ``<prefix>ForTokenClassification``.
        blocks: mapping rules of the trunk; rules of a bias apply only to models that have one.
        qkv_bias: whether the query, key and value projections have a bias; ``config``: if ``attention_bias`` is set.
        output_bias: whether ``attention_bias`` also adds a bias to the attention's output projection.
        qk_norm: whether queries and keys are normalised per head.
        moe: whether the models are mixtures of experts.
        unused_window: whether the config names a sliding window that is unused without ``use_sliding_window``.
        rotary_percent: default of ``partial_rotary_factor``, the rotated share of each head; None: the family rotates all of it.
        rotary_interleaved: whether neighbouring elements are rotated together instead of elements of the two halves.
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
"""Families by ``model_type`` of the config."""
