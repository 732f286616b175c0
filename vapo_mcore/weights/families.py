"""Mapping rules from Hugging Face tensors to Megatron parameters, in blocks that the records of ``config.families`` name.

For example a Llama-like model whose attention output is normalised before the residual would have a block::

    "post_attention_norm": (
        Rule(
            (f"{_MCORE}.post_self_attn_layernorm.weight",),
            ((f"{_HF}.post_self_attention_layernorm.weight", ("hidden",)),),
            "copy",
        ),
    )

The shapes in the rules are checked against the checkpoint before any tensor is read, so a wrong entry is reported by name.
"""

from __future__ import annotations

from vapo_mcore.config.families import FAMILIES
from vapo_mcore.weights.rules import Rule

_MCORE = "decoder.layers.{layer}"
_HF = "model.layers.{layer}"

EMBEDDING = (Rule(("embedding.word_embeddings.weight",), (("model.embed_tokens.weight", ("vocab", "hidden")),), "vocab"),)

ATTENTION = (
    Rule(
        (f"{_MCORE}.input_layernorm.weight", f"{_MCORE}.self_attention.linear_qkv.layer_norm_weight"),
        ((f"{_HF}.input_layernorm.weight", ("hidden",)),),
        "copy",
    ),
    Rule(
        (f"{_MCORE}.self_attention.linear_qkv.weight",),
        (
            (f"{_HF}.self_attn.q_proj.weight", ("q", "hidden")),
            (f"{_HF}.self_attn.k_proj.weight", ("kv", "hidden")),
            (f"{_HF}.self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        "qkv",
    ),
    Rule((f"{_MCORE}.self_attention.linear_proj.weight",), ((f"{_HF}.self_attn.o_proj.weight", ("hidden", "q")),), "row"),
)

QKV_BIAS = (
    Rule(
        (f"{_MCORE}.self_attention.linear_qkv.bias",),
        (
            (f"{_HF}.self_attn.q_proj.bias", ("q",)),
            (f"{_HF}.self_attn.k_proj.bias", ("kv",)),
            (f"{_HF}.self_attn.v_proj.bias", ("kv",)),
        ),
        "qkv",
        when="qkv_bias",
    ),
)

OUTPUT_BIAS = (
    Rule(
        (f"{_MCORE}.self_attention.linear_proj.bias",),
        ((f"{_HF}.self_attn.o_proj.bias", ("hidden",)),),
        "copy",
        when="attention_output_bias",
    ),
)

QK_NORM = (
    Rule((f"{_MCORE}.self_attention.q_layernorm.weight",), ((f"{_HF}.self_attn.q_norm.weight", ("head",)),), "copy"),
    Rule((f"{_MCORE}.self_attention.k_layernorm.weight",), ((f"{_HF}.self_attn.k_norm.weight", ("head",)),), "copy"),
)

MLP_NORM = (
    Rule(
        (f"{_MCORE}.pre_mlp_layernorm.weight", f"{_MCORE}.mlp.linear_fc1.layer_norm_weight"),
        ((f"{_HF}.post_attention_layernorm.weight", ("hidden",)),),
        "copy",
    ),
)

# With experts this norm is never fused: save it under its own name (the last one).
MOE_NORM = (
    Rule(
        (f"{_MCORE}.mlp.linear_fc1.layer_norm_weight", f"{_MCORE}.pre_mlp_layernorm.weight"),
        ((f"{_HF}.post_attention_layernorm.weight", ("hidden",)),),
        "copy",
    ),
)

GATED_MLP = (
    Rule(
        (f"{_MCORE}.mlp.linear_fc1.weight",),
        ((f"{_HF}.mlp.gate_proj.weight", ("ffn", "hidden")), (f"{_HF}.mlp.up_proj.weight", ("ffn", "hidden"))),
        "gated",
    ),
    Rule((f"{_MCORE}.mlp.linear_fc2.weight",), ((f"{_HF}.mlp.down_proj.weight", ("hidden", "ffn")),), "row"),
)

GATE_UP_MLP = (
    Rule((f"{_MCORE}.mlp.linear_fc1.weight",), ((f"{_HF}.mlp.gate_up_proj.weight", ("gate_and_up", "hidden")),), "gate_up"),
    GATED_MLP[1],
)

_EXPERTS = f"{_MCORE}.mlp.experts"
MOE_MLP = (
    Rule((f"{_MCORE}.mlp.router.weight",), ((f"{_HF}.mlp.gate.weight", ("experts", "hidden")),), "copy"),
    Rule(
        (f"{_EXPERTS}.local_experts.{{expert}}.linear_fc1.weight", f"{_EXPERTS}.linear_fc1.weight{{expert}}"),
        (
            (f"{_HF}.mlp.experts.{{expert}}.gate_proj.weight", ("expert_ffn", "hidden")),
            (f"{_HF}.mlp.experts.{{expert}}.up_proj.weight", ("expert_ffn", "hidden")),
        ),
        "gated",
    ),
    Rule(
        (f"{_EXPERTS}.local_experts.{{expert}}.linear_fc2.weight", f"{_EXPERTS}.linear_fc2.weight{{expert}}"),
        ((f"{_HF}.mlp.experts.{{expert}}.down_proj.weight", ("hidden", "expert_ffn")),),
        "row",
    ),
)

FINAL_NORM = (Rule(("decoder.final_layernorm.weight",), (("model.norm.weight", ("hidden",)),), "copy"),)

LM_HEAD = (
    Rule(("output_layer.weight",), (("lm_head.weight", ("vocab", "hidden")),), "vocab", when="not tie_word_embeddings"),
    # With tied embeddings Megatron's last pipeline stage holds a second copy of the embedding (PP > 1 only).
    Rule(
        ("output_layer.weight",),
        (("model.embed_tokens.weight", ("vocab", "hidden")),),
        "vocab",
        when="tie_word_embeddings",
        tied_copy=True,
    ),
)

# Names of transformers' token classifiers. transformers has no two-layer head, so that head gets other names: its classes then report a
# missing head instead of loading it as a linear one.
VALUE_HEAD = (
    Rule(("output_layer.weight",), (("score.weight", ("values", "hidden")),), "copy", when="not mlp_value_head"),
    Rule(("output_layer.bias",), (("score.bias", ("values",)),), "copy", when="not mlp_value_head"),
    Rule(("output_layer.dense.weight",), (("score.dense.weight", ("hidden", "hidden")),), "copy", when="mlp_value_head"),
    Rule(("output_layer.dense.bias",), (("score.dense.bias", ("hidden",)),), "copy", when="mlp_value_head"),
    Rule(("output_layer.weight",), (("score.out.weight", ("values", "hidden")),), "copy", when="mlp_value_head"),
    Rule(("output_layer.bias",), (("score.out.bias", ("values",)),), "copy", when="mlp_value_head"),
)
HEAD_PREFIX = "score."
"""Prefix of the HF names of a critic's head; no other tensor has it."""

BLOCKS: dict[str, tuple[Rule, ...]] = {
    "embedding": EMBEDDING,
    "attention": ATTENTION,
    "qkv_bias": QKV_BIAS,
    "output_bias": OUTPUT_BIAS,
    "qk_norm": QK_NORM,
    "mlp_norm": MLP_NORM,
    "moe_norm": MOE_NORM,
    "gated_mlp": GATED_MLP,
    "gate_up_mlp": GATE_UP_MLP,
    "moe_mlp": MOE_MLP,
    "final_norm": FINAL_NORM,
}
"""By the names that the records of ``config.families`` list."""


def trunk_rules(family: str) -> tuple[Rule, ...]:
    """Return the rules of a family's trunk; ``plan_mapping`` adds the head of the role (LM_HEAD or VALUE_HEAD)."""
    return tuple(rule for block in FAMILIES[family].blocks for rule in BLOCKS[block])
