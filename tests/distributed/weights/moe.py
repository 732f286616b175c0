"""Megatron-Core's own mixture of experts of a Qwen3-MoE architecture, for checking names, shapes and checkpoints; training refuses one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.megatron.host import megatron_scope
from vapo_mcore.megatron.model import padded_vocab_size
from vapo_mcore.megatron.parallel import ParallelContext


def moe_chunk(arch: ModelArchitecture, parallel: ParallelContext, *, expert_parallel: int = 1, device: torch.device | None = None) -> Any:
    """This rank's GPTModel with sequential experts in bfloat16, cut over tensor, pipeline and expert parallelism."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    with megatron_scope(device):
        config = TransformerConfig(
            num_layers=arch.num_layers,
            hidden_size=arch.hidden_size,
            ffn_hidden_size=arch.ffn_hidden_size,
            moe_ffn_hidden_size=arch.moe_ffn_hidden_size,
            num_moe_experts=arch.num_experts,
            moe_router_topk=arch.num_experts_per_token,
            num_attention_heads=arch.num_attention_heads,
            num_query_groups=arch.num_key_value_heads,
            kv_channels=arch.head_dim,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            expert_model_parallel_size=expert_parallel,
            sequence_parallel=False,
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            bf16=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            moe_token_dispatcher_type="alltoall",
        )
        spec = get_gpt_layer_local_spec(num_experts=arch.num_experts, qk_layernorm=True, normalization="RMSNorm")
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab_size(arch.vocab_size, parallel.tensor_model_parallel_size),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
