"""Tiny models with random weights, the same on every device and in every layout, and micro-batches for them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import ModelConfig, OptimizerConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext

SHAPE = ModelArchitecture(
    family="qwen2",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=True,
    attention_output_bias=False,
    qk_norm=False,
)

MIXTURE = dataclasses.replace(
    SHAPE,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    num_experts=4,
    num_experts_per_token=2,
    moe_ffn_hidden_size=32,
    norm_topk_prob=True,
)
"""The same with four experts a layer."""

LENGTHS = [[37, 5, 1], [20, 2]]
"""Tokens of the sequences of two micro-batches."""


class TokenLoss:
    """Negative log-likelihood (a policy) or half squared values (a critic), weighted per token."""

    tensors = ("weight",)
    temperature = 1.0
    needs_entropy = False

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        term = -outputs["logprobs"] if "logprobs" in outputs else outputs["values"].square() / 2
        return (term * batch["weight"]).sum(), {"tokens": batch["mask"].sum(), "term_max": term.detach().max()}


@torch.no_grad()
def random_weights(chunks: list[Any]) -> None:
    """Drawn on the host, each tensor from its own name and shape: shards of a layout differ, both devices have the same."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {tuple(parameter.shape)}".encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def build(
    role: Any,
    parallel: ParallelContext,
    *,
    dtype: Any = "float32",
    attention: Any = "sdpa",
    recompute: Any = "none",
    cpu_offload: bool = False,
    head_only: bool = False,
    shape: ModelArchitecture = SHAPE,
) -> MegatronModel:
    settings = ModelConfig(path="unused: weights are random", dtype=dtype, attention=attention, recompute=recompute)
    optimizer = OptimizerConfig(lr=1e-3, warmup_rollouts=0, cpu_offload=cpu_offload)
    return MegatronModel(role, shape, settings, parallel, load_weights=random_weights, optimizer=optimizer, head_only=head_only)


def microbatches(parallel: ParallelContext, lengths: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """The same tokens on every rank; weights sum to 1."""
    generator = torch.Generator().manual_seed(1)
    total = sum(map(sum, lengths))
    result = []
    for part in lengths:
        count = sum(part)
        tensors = {
            "tokens": torch.randint(0, SHAPE.vocab_size, (count,), generator=generator),
            "response_mask": torch.ones(count, dtype=torch.bool),
            "weight": torch.full((count,), 1.0 / total),
        }
        layout = ThdLayout(
            part,
            device=parallel.device,
            context_parallel_size=parallel.context_parallel_size,
            context_parallel_rank=parallel.context_parallel_rank,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
        )
        result.append(MicroBatch(layout, torch.arange(len(part)), {name: tensor.to(parallel.device) for name, tensor in tensors.items()}))
    return result
