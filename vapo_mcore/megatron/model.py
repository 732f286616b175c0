"""Build Megatron ``GPTModel`` chunks for a Hugging Face architecture: the policy, or the critic with its scalar head."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vapo_mcore.config.architecture import ModelArchitecture, padded_vocab_size
from vapo_mcore.errors import ConfigError
from vapo_mcore.megatron.attention import RMSNorm, SegmentAttention, VarlenAttention
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.rope import RotaryTable, inverse_frequencies, softmax_scale

if TYPE_CHECKING:
    from vapo_mcore.config.schema import ModelConfig
    from vapo_mcore.megatron.parallel import ParallelContext

Role = Literal["policy", "critic"]
Attention = Literal["te", "varlen", "sdpa"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_attention(requested: str, context_parallel_size: int, dtype: str) -> Attention:
    """Return the attention implementation: the requested one, or for ``auto`` the best available on this machine.

    ``auto`` selects ``sdpa`` for float32: Transformer Engine computes float32 matrix products in TF32 (10 bits of mantissa), and its flash
    attention, like torch's variable-length kernel, supports only 16-bit types.

    Raises ConfigError if the requested implementation cannot run on this machine.
    """
    has_te = HAS_CUDA and find_spec("transformer_engine") is not None
    if requested == "auto":
        if dtype == "float32":
            return "sdpa"
        if has_te:
            return "te"
        return "varlen" if HAS_CUDA and context_parallel_size == 1 else "sdpa"
    if requested == "te" and dtype == "float32" and context_parallel_size > 1:
        raise ConfigError(
            "model.attention = te with model.dtype = float32 does not support context parallelism: Transformer Engine's attention "
            "over several ranks takes 16-bit types only; use auto or sdpa, or model.dtype = bfloat16"
        )
    if requested == "te" and not has_te:
        raise ConfigError("model.attention = te requires CUDA and the transformer-engine package; use auto, varlen or sdpa")
    if requested == "varlen" and not HAS_CUDA:
        raise ConfigError("model.attention = varlen requires CUDA; use auto or sdpa")
    if requested == "varlen" and context_parallel_size > 1:
        raise ConfigError("model.attention = varlen does not support context parallelism; use te or sdpa")
    return requested  # type: ignore[return-value]


def layer_kind(attention: Attention, *, experts: bool = False) -> Literal["te", "te_grouped", "local"]:
    """Return whose layers this attention is built into: Transformer Engine's (of a mixture with grouped experts) or Megatron-Core's own.

    They have the same parameters in different orders: Transformer Engine's norms are part of the projections that follow them, and its
    grouped experts have the first projections of all experts before the second ones. ``experts``: the model is a mixture.
    """
    if attention != "te":
        return "local"
    return "te_grouped" if experts else "te"


def recompute_settings(recompute: str, attention: Attention, *, experts: bool = False) -> dict[str, Any]:
    """Return Megatron's recomputation settings for ``model.recompute``.

    ``selective`` recomputes the MLP, and with ``sdpa`` also attention, whose kernels may save the scores [heads, length, length]. Flash
    attention (``te``, ``varlen``) saves inputs, output and one number per row, and recomputes the scores in its backward. ``experts``: the
    MLP is a mixture, which is recomputed with its router and both exchanges of tokens.
    """
    if recompute == "selective":
        modules = ["core_attn"] if attention == "sdpa" else []
        return {"recompute_granularity": "selective", "recompute_modules": [*modules, "moe" if experts else "mlp"]}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


class ValueHead(nn.Linear):
    """Value head [outputs, hidden] in float32, replacing GPTModel's output layer: one output, or one logit per bin.

    Under sequence parallelism each TP rank computes the values of its slice of the tokens, which are then gathered; weight and bias
    receive partial gradients on each rank and are marked for summation over TP. Both start at zero until the loader sets them.
    """

    def __init__(self, hidden_size: int, *, outputs: int = 1, sequence_parallel: bool, group: Any) -> None:
        super().__init__(hidden_size, outputs, bias=True, dtype=torch.float32, device=torch.cuda.current_device())
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.sequence_parallel = sequence_parallel
        self.group = group
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def features(self, hidden: Tensor) -> Tensor:
        """Return the input of the last, linear layer."""
        return hidden

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map [local tokens, 1, hidden] to ([tokens, 1, outputs] float32, None), like a Megatron output layer."""
        values = super().forward(self.features(hidden.float()))
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.group)
        return values, None


class MlpValueHead(ValueHead):
    """Two-layer value head in float32: linear(dropout(tanh(dense(dropout(h))))), from a published review; the default is one linear layer.

    Dropout is active in training steps only. Ranks that hold different tokens draw from different random streams (``stream``).
    """

    def __init__(self, hidden_size: int, *, outputs: int = 1, sequence_parallel: bool, group: Any, dropout: float, stream: int) -> None:
        super().__init__(hidden_size, outputs=outputs, sequence_parallel=sequence_parallel, group=group)
        self.dense = nn.Linear(hidden_size, hidden_size, bias=True, dtype=torch.float32, device=self.weight.device)
        self.dropout = dropout
        self.stream = stream
        self.update = self.draws = 0
        for parameter in (self.dense.weight, self.dense.bias):
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def features(self, hidden: Tensor) -> Tensor:
        return self._drop(torch.tanh(self.dense(self._drop(hidden))))

    def begin(self, update: int) -> None:
        """Begin an optimizer step. Its number seeds the dropout masks, so that a resumed run draws the same ones."""
        self.update, self.draws = update, 0

    def _drop(self, x: Tensor) -> Tensor:
        if self.dropout == 0.0 or not torch.is_grad_enabled():
            return x
        self.draws += 1
        digest = hashlib.blake2b(f"value head/{self.stream}/{self.update}/{self.draws}".encode(), digest_size=4).digest()
        generator = torch.Generator(x.device).manual_seed(int.from_bytes(digest, "little"))  # CPU generators take 32 bits
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.dropout
        return torch.where(kept, x / (1.0 - self.dropout), 0.0)


def transformer_config(architecture: ModelArchitecture, model: ModelConfig, parallel: ParallelContext) -> Any:
    """Return Megatron's TransformerConfig for one model in this layout.

    ``calculate_per_token_loss`` makes Megatron sum gradients over data and context parallelism without dividing them: losses are
    already divided by the mini-batch's denominators.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[model.dtype]
    attention = choose_attention(model.attention, parallel.context_parallel_size, model.dtype)
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        softmax_scale=softmax_scale(architecture),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=parallel.variable_lengths,
        moe_token_dispatcher_type="alltoall",  # the default rejects variable_seq_lengths, even for dense models
        calculate_per_token_loss=True,
        batch_p2p_comm=False,
        # All weights are loaded from files. perform_initialization=False would not work: Megatron would not mark tensor-parallel
        # weights as such, and the gradient norm would count only the first shard.
        init_method=_uninitialized,
        output_layer_init_method=_uninitialized,
        embedding_init_method=_uninitialized,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=HAS_CUDA,
        rotary_interleaved=architecture.rotary_interleaved,
        apply_rope_fusion=attention == "te" and not architecture.rotary_interleaved,
        persist_layer_norm=attention == "te",
        deallocate_pipeline_outputs=True,
        **recompute_settings(model.recompute, attention, experts=architecture.is_moe),
        **_expert_settings(architecture, parallel, attention),
    )


def _expert_settings(architecture: ModelArchitecture, parallel: ParallelContext, attention: Attention) -> dict[str, Any]:
    """Return the settings of a mixture of experts, routed as in Qwen3-MoE.

    The softmax is computed in float32, before the top-k or, equivalent to normalising afterwards, over the chosen experts. Each token
    reaches all its experts: no capacity limits how many tokens an expert takes. Transformer Engine's layers multiply all experts of a
    rank in one grouped product; Megatron-Core offers no maintained grouped product without them.
    """
    if not architecture.is_moe:
        return {}
    return {
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "num_moe_experts": architecture.num_experts,
        "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
        "moe_grouped_gemm": attention == "te",
        "moe_router_topk": architecture.num_experts_per_token,
        "moe_router_pre_softmax": not architecture.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def _uninitialized(weight: Tensor) -> Tensor:
    return weight


def packed_block_spec(config: Any, attention: Attention, vp_stage: int | None) -> Any:
    """Return the layer specification of one model chunk for packed sequences."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if attention == "te":
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
        norm: Any = TENorm
    else:
        core = VarlenAttention if attention == "varlen" else SegmentAttention
        layer, norm = _local_layer_spec(config.qk_layernorm, core, config.num_moe_experts), RMSNorm
    if config.num_moe_experts is not None:
        from vapo_mcore.megatron.router import Router

        layer.submodules.mlp.submodules.router = Router
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _local_layer_spec(qk_norm: bool, core_attention: type[nn.Module], num_experts: int | None) -> Any:
    """Return a transformer layer of Megatron's modules with our packed attention and norm, and sequential experts if any."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    head_norm: Any = RMSNorm if qk_norm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=core_attention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    # Save the norms under Transformer Engine's names, so that checkpoints load with and without it.
    stored_names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if num_experts is not None:
        del stored_names["pre_mlp_layernorm."]  # not fused with experts
        mlp = get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False)
    submodules = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=stored_names,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def build_chunks(
    role: Role,
    architecture: ModelArchitecture,
    model: ModelConfig,
    parallel: ParallelContext,
    *,
    device: torch.device | None = None,
    for_training: bool = True,
    head_dropout: float = 0.0,
) -> list[Any]:
    """Build this rank's GPTModel chunks (one, or one per virtual pipeline stage) with uninitialised weights.

    A critic is the same model with a :class:`ValueHead`. Its embeddings are untied at construction, so that pipeline stages never
    reduce a [vocabulary, hidden] gradient with a [1, hidden] one.
    ``device=torch.device("meta")`` builds without memory. ``for_training``: reject architectures that are verified for forward passes
    only. ``head_dropout``: dropout of a two-layer value head.
    """
    if for_training:
        _refuse_unsupported(architecture)
    with parallel.scope(device):
        config = transformer_config(architecture, model, parallel)
        attention = choose_attention(model.attention, parallel.context_parallel_size, model.dtype)
        stages = parallel.virtual_pipeline_model_parallel_size
        numbers = range(stages) if stages else (None,)
        chunks = [_build_chunk(role, architecture, config, attention, parallel, stage) for stage in numbers]
        if role == "critic" and chunks[-1].post_process:
            chunks[-1].output_layer = _value_head(architecture, parallel, head_dropout)
        if architecture.is_moe:
            for chunk in chunks:
                chunk.to(torch.cuda.current_device())  # Megatron builds routers on the host, and would move them in the first pass
        return chunks


def _value_head(architecture: ModelArchitecture, parallel: ParallelContext, dropout: float) -> ValueHead:
    layout: dict[str, Any] = {"sequence_parallel": parallel.sequence_parallel, "group": parallel.tensor_model_parallel_group}
    layout["outputs"] = architecture.value_outputs
    if not architecture.mlp_value_head:
        return ValueHead(architecture.hidden_size, **layout)
    # Ranks with the same tokens must draw the same masks: all ranks of a TP group, unless sequence parallelism splits the tokens.
    stream = parallel.data_parallel_rank * parallel.context_parallel_size + parallel.context_parallel_rank
    stream = stream * parallel.tensor_model_parallel_size + (parallel.tensor_model_parallel_rank if parallel.sequence_parallel else 0)
    return MlpValueHead(architecture.hidden_size, **layout, dropout=dropout, stream=stream)


def _refuse_unsupported(architecture: ModelArchitecture) -> None:
    if architecture.attention_output_bias:
        raise ConfigError("training models with a bias on the attention output (attention_bias of the llama family) is not supported yet")


def _build_chunk(
    role: Role, architecture: ModelArchitecture, config: Any, attention: Attention, parallel: ParallelContext, vp_stage: int | None
) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_model import GPTModel

    first = ps.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    last = ps.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=packed_block_spec(config, attention, vp_stage),
        vocab_size=padded_vocab_size(architecture.vocab_size, parallel.tensor_model_parallel_size),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings and role != "critic",
        position_embedding_type="rope",
        rotary_percent=architecture.rotary_percent,
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        vp_stage=vp_stage,
    )
    chunk.rotary_pos_emb.inv_freq = inverse_frequencies(architecture, chunk.rotary_pos_emb.inv_freq)
    chunk.rotary_pos_emb.forward = RotaryTable(chunk.rotary_pos_emb.get_emb)
    return chunk


def trunk_parameters(chunks: list[Any]) -> list[nn.Parameter]:
    """Return all parameters except those of a value head."""
    heads = {
        id(p) for chunk in chunks if isinstance(getattr(chunk, "output_layer", None), ValueHead) for p in chunk.output_layer.parameters()
    }
    return [p for chunk in chunks for p in chunk.parameters() if id(p) not in heads]


WeightLoader = Callable[[list[Any]], object]
"""Fills the chunks of a freshly built model (see ``vapo_mcore.weights``)."""
