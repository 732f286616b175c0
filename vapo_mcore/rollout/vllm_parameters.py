"""Access to vLLM's model: compare its parameters with full HF tensors, pack experts, exclude token ids from sampling, record logits.

vLLM fuses q, k, v and gate, up into one parameter each (``packed_modules_mapping``) and shards them over its tensor parallelism
differently from Megatron: whole blocks of q, k and v one after the other, with key-value heads repeated if there are fewer than ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.errors import ConfigError, RolloutError
from vapo_mcore.rollout.weight_stream import listed


def holds(model: nn.Module, name: str, full: Tensor) -> bool:
    """Return whether vLLM's parameter exactly equals this rank's part of the HF tensor ``full``.

    ``model`` must keep its parameters as loaded: unquantised models on CUDA do; on CPU linear layers repack them.
    """
    module, leaf, part = _place(model, name)
    parameter = getattr(module, leaf).detach()
    expected, actual = _blocks(module, leaf, part, full, parameter)
    return expected.shape == actual.shape and torch.equal(expected.to(actual), actual)


_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(?:.*\.)?(w13|w2)_weight")
_CPU_EXPERT_MULTIPLE = 32
_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\..*")


def expert_tensors(name: str, experts: int) -> set[str] | None:
    """Return the HF names of vLLM's stacked weights of ``experts`` experts (gate and up, or down); None for other parameters."""
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return None
    kinds = ("gate_proj", "up_proj") if match[2] == "w13" else ("down_proj",)
    return {f"{match[1]}.{number}.{kind}.weight" for number in range(experts) for kind in kinds}


def is_expert_tensor(name: str) -> bool:
    """Return whether a HF tensor belongs to an expert."""
    return _EXPERT.fullmatch(name) is not None


def pack_experts(model: nn.Module) -> None:
    """Pack the experts' weights for vLLM's CPU kernel after a reload, which vLLM itself does only when it builds the engine (0.32)."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            method: Any = module.quant_method
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


def require_unpadded_experts(folder: str | Path, architecture: ModelArchitecture, ranks: int) -> None:
    """Raise ConfigError for experts that vLLM's CPU kernel pads: their weights cannot be loaded again."""
    size = architecture.moe_ffn_hidden_size
    if size is None or (size // ranks % _CPU_EXPERT_MULTIPLE == 0 and architecture.hidden_size % _CPU_EXPERT_MULTIPLE == 0):
        return
    raise ConfigError(
        f"vLLM's CPU kernel for experts needs hidden_size and moe_intermediate_size / {ranks} ranks in multiples of "
        f"{_CPU_EXPERT_MULTIPLE}, but {folder} has {architecture.hidden_size} and {size}; use rollout.engine: transformers"
    )


def require_parameters_of(llm: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise RolloutError unless vLLM's parameters, unpacked (``qkv_proj`` -> ``q_proj``, ...), have the HF names that a sync fills."""
    sizes, packed = llm.apply_model(
        lambda model: ({name: len(parameter) for name, parameter in model.named_parameters()}, dict(model.packed_modules_mapping))
    )[0]
    unpacked: set[str] = set()
    for name, size in sizes.items():
        if (names := expert_tensors(name, size)) is not None:
            unpacked |= names
            continue
        module, _, leaf = name.rpartition(".")
        parent, _, module = module.rpartition(".")
        unpacked |= {".".join(filter(None, (parent, part, leaf))) for part in packed.get(module, [module])}
    if unpacked != set(shapes):
        raise RolloutError(
            "vLLM builds a different model from this folder than transformers; only in vLLM: "
            f"{listed(unpacked - set(shapes)) or 'nothing'}; only in transformers: {listed(set(shapes) - unpacked) or 'nothing'}"
        )


def prepare_tied_heads(model: torch.nn.Module) -> None:
    """Update tied output heads after a reload.

    vLLM processes reloaded weights only in the layer they are loaded into, the embedding. On CPU a tied head has a separate packed copy,
    which would keep the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    embeddings = {id(parameter) for name, parameter in model.named_parameters() if "lm_head" not in name}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            module.quant_method.process_weights_after_loading(module)


def parameters_without_storage(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters that have no values."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def _place(model: nn.Module, name: str) -> tuple[Any, str, int]:
    """Return module and attribute of the parameter that contains a HF tensor, and the index of the part."""
    path, _, leaf = name.rpartition(".")
    parent, _, child = path.rpartition(".")
    for packed, parts in getattr(model, "packed_modules_mapping", {}).items():
        if child in parts and hasattr(model.get_submodule(parent), packed):
            return model.get_submodule(f"{parent}.{packed}"), leaf, list(parts).index(child)
    return model.get_submodule(path), leaf, 0


def _blocks(module: Any, leaf: str, part: int, full: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's rows or columns of ``full``, and the corresponding region of the parameter."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):  # ParallelLMHead too; rows beyond the vocabulary are padding
        first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return full[first:last], parameter[: last - first]
    if isinstance(module, QKVParallelLinear):
        size, kv_size = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        start, rank = (0, size, size + kv_size)[part], module.tp_rank
        if part:
            size, rank = kv_size, module.tp_rank // module.num_kv_head_replicas
        return full[rank * size : (rank + 1) * size], parameter[start : start + size]
    if isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        if full.shape[0] == sum(module.output_sizes):  # stored as one tensor: this rank's block of each part
            return torch.cat([part.chunk(module.tp_size)[module.tp_rank] for part in full.split(module.output_sizes)]), parameter
        start, size = sum(sizes[:part]), sizes[part]
        return full[module.tp_rank * size : (module.tp_rank + 1) * size], parameter[start : start + size]
    if isinstance(module, ColumnParallelLinear):
        return full.chunk(module.tp_size, dim=0)[module.tp_rank], parameter
    if isinstance(module, RowParallelLinear) and leaf == "weight":
        return full.chunk(module.tp_size, dim=1)[module.tp_rank], parameter
    return full, parameter


def exclude_tokens(model: nn.Module, token_ids: Sequence[int]) -> None:
    """Make the model return -inf logits for ``token_ids``, so that they have probability 0 in greedy and sampled decoding and log-probs.

    Takes one fill of a few columns per step. vLLM's ``allowed_token_ids`` would need the whole vocabulary in each request, and its
    ``logit_bias`` is bounded.
    """
    if not token_ids:
        return
    compute: Any = model.compute_logits
    columns = torch.tensor(sorted(token_ids), dtype=torch.int64)

    def compute_logits(*arguments: Any, **options: Any) -> Tensor | None:
        nonlocal columns
        logits: Tensor | None = compute(*arguments, **options)
        if logits is None:  # a rank that does not sample
            return None
        columns = columns.to(logits.device)
        return logits.index_fill_(-1, columns, float("-inf"))

    setattr(model, "compute_logits", compute_logits)  # noqa: B010 (a Module declares its attributes as tensors and modules)


@contextmanager
def recorded_logits(llm: Any) -> Iterator[list[Tensor]]:
    """Record what the model's ``compute_logits`` returns in the block, float32 [rows, vocabulary] a call, on the host."""
    recorded: list[Tensor] = []

    def replace(model: Any) -> None:
        original = model.compute_logits

        def compute_logits(*arguments: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = original(*arguments, **options)
            if logits is not None:
                recorded.append(logits.detach().to("cpu", torch.float32, copy=True))
            return logits

        previous.append(vars(model).get("compute_logits"))
        model.compute_logits = compute_logits

    def restore(model: Any) -> None:
        del model.compute_logits
        if previous[0] is not None:
            model.compute_logits = previous[0]

    previous: list[Any] = []
    llm.apply_model(replace)
    try:
        yield recorded
    finally:
        llm.apply_model(restore)


def prompt_distribution(recorded: Sequence[Tensor], ids: Sequence[int], positions: Any, vocab_size: int) -> Tensor:
    """Return a prompt's log-probs, float32 [len(ids) - 1, vocab_size], from the recorded logits that give vLLM's log-probs of its tokens.

    Other logits are recorded too, for the token that vLLM samples after the prompt. Raises RolloutError if no logits match.
    """
    own = torch.tensor([positions.logprobs[start] for start in positions.start_indices[1:]])  # the first position has none
    following = torch.tensor(list(ids[1:]), dtype=torch.int64)[:, None]
    for logits in recorded:
        if len(logits) < len(following):
            continue
        logprobs = logits[: len(following), :vocab_size].log_softmax(-1)
        if torch.allclose(logprobs.gather(-1, following)[:, 0], own, rtol=0, atol=1e-4):
            return logprobs
    shapes = ", ".join(str(tuple(logits.shape)) for logits in recorded) or "nothing"
    raise RolloutError(f"vLLM's logits ({shapes}) do not give the log-probs that it returns for a prompt of {len(ids)} tokens")
