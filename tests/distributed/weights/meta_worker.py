"""The plans of 30B to 70B models against Megatron's own parameters at TP8 x PP4, on the meta device in one process.

python meta_worker.py: a fake process group stands for the 32 ranks, one pipeline stage after the other; prints "model NAME: N parameters".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import ModelConfig, ParallelConfig
from vapo_mcore.megatron.host import megatron_scope
from vapo_mcore.megatron.model import build_chunks, padded_vocab_size
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.weights.plan import global_parameters, match_parameters, plan_mapping, require_complete

TP, PP = 8, 4
META = torch.device("meta")
PARAMETERS = {"qwen2.5-32b": 32_763_876_352, "qwen3-32b": 32_762_123_264, "llama-3.3-70b": 70_553_706_496, "qwen3-30b-a3b": 30_532_122_624}
"""Numbers that the models' cards and safetensors indices state."""


def stage_chunks(arch: ModelArchitecture, parallel: ParallelContext) -> list[Any]:
    if not arch.is_moe:
        return build_chunks("policy", arch, ModelConfig(path="unused"), parallel, device=META)
    return [moe_chunk(arch, parallel)]


def moe_chunk(arch: ModelArchitecture, parallel: ParallelContext) -> Any:
    """Megatron's own mixture of experts with sequential experts; training one is not supported yet, converting one is."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    with megatron_scope(META):
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
            tensor_model_parallel_size=TP,
            pipeline_model_parallel_size=PP,
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
            vocab_size=padded_vocab_size(arch.vocab_size, TP),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )


def check(name: str) -> None:
    arch = find_architecture(name)
    plan = plan_mapping(arch, "policy")
    held: list[int] = []
    for stage in range(PP):
        dist.init_process_group("fake", store=FakeStore(), rank=stage * TP, world_size=TP * PP)
        degrees = {"tensor_model_parallel_size": TP, "pipeline_model_parallel_size": PP}
        parallel = initialize_parallel(ParallelConfig(world_size=TP * PP, **degrees))  # type: ignore[arg-type]
        assert parallel.pipeline_model_parallel_rank == stage
        for index, parameter in match_parameters(plan, global_parameters(stage_chunks(arch, parallel))).items():
            assert tuple(parameter.shape) == plan[index].shard_shape(TP, arch), plan[index]
            held.append(index)
        dist.destroy_process_group()
    assert sorted(held) == list(range(len(plan)))
    require_complete(plan, held)
    count = sum(torch.Size(shape).numel() for entry in plan for shape in entry.hf_shapes)
    assert count == PARAMETERS[name], count
    print(f"model {name}: {count} parameters", flush=True)


if __name__ == "__main__":
    for model in PARAMETERS:
        check(model)
