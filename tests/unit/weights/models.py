"""Small random Hugging Face models of every family, and model chunks with Megatron's parameter names and shapes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.weights.plan import Role, plan_mapping

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_biased": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2_tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "glm": {"attention_bias": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": []},
}


def hf_config(model: str) -> Any:
    from transformers import AutoConfig

    family = model.removesuffix("_tied").removesuffix("_biased")
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or family != "qwen2"}
    if family == "qwen2":  # its config has no head_dim
        sizes["hidden_size"] = 64
    return AutoConfig.for_model(family, **{**sizes, "tie_word_embeddings": False, **FAMILIES[model]})


class Chunk(nn.Module):
    """Parameters of one TP rank and one pipeline stage under Megatron's names: local layer numbers, global ``layer_number``."""

    def __init__(
        self,
        arch: ModelArchitecture,
        role: Role,
        *,
        tp: int = 1,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        spelling: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        layers = range(arch.num_layers) if layers is None else layers
        for entry in plan_mapping(arch, role):
            name = entry.mcore_names[min(spelling, len(entry.mcore_names) - 1)]
            local = name
            if name.startswith("decoder.layers."):
                number = int(name.split(".")[2])
                if number not in layers:
                    continue
                local = name.replace(f"layers.{number}.", f"layers.{number - layers.start}.", 1)
            elif (name.startswith("embedding") and not first) or (not name.startswith("embedding") and not last):
                continue
            if entry.tied_copy and first:
                continue
            kept = torch.float32 if entry.hf_names[0].startswith("score.") else dtype
            self._add(local, torch.full(entry.shard_shape(tp, arch), float("nan"), dtype=kept))
        for index in range(len(layers)):
            self.get_submodule(f"decoder.layers.{index}").layer_number = layers.start + index + 1  # type: ignore[assignment]

    def _add(self, name: str, value: Tensor) -> None:
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(value))


def layout(tp: int = 1, rank: int = 0) -> Any:
    """One process standing for TP rank ``rank``: loading needs no communication without pipeline parallelism."""
    return SimpleNamespace(
        tensor_model_parallel_size=tp,
        tensor_model_parallel_rank=rank,
        tensor_model_parallel_group=None,
        pipeline_model_parallel_size=1,
        pipeline_model_parallel_rank=0,
        pipeline_model_parallel_group=None,
        context_parallel_rank=0,
        data_parallel_rank=0,
        expert_model_parallel_size=1,
        expert_model_parallel_rank=0,
        expert_model_parallel_group=None,
        expert_tensor_parallel_size=tp,
        expert_tensor_parallel_rank=rank,
        expert_tensor_parallel_group=None,
    )


def make_arch(**changes: Any) -> ModelArchitecture:
    values: dict[str, Any] = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 37,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "qkv_bias": False,
        "attention_output_bias": False,
        "qk_norm": False,
    }
    return ModelArchitecture(**{**values, **changes})


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder through the official library."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
