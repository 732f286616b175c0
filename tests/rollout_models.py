"""Small random Hugging Face models that every rollout engine can run (vLLM's CPU attention needs heads of at least 32), and oracles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EOS = 1
VOCAB = 131
"""Odd and not a multiple of 64: vLLM and Megatron pad such a vocabulary, transformers does not."""
STORED_TWICE = "_stored_twice"
"""Suffix of a tied model whose file also contains the head, as written by some tools."""
MODELS = ("qwen2", "qwen2_tied", "qwen3", "llama_tied", "qwen3_moe")
UNKNOWN = (70, *range(124, 130))
"""Ids missing in the tokenizer: a gap and a range near the end. No prompt contains them."""
PROMPTS = [[4, 13, 5, 17], [30], [100, 5, 6, 7, 8, 9, 10, 17], [4, 13, 5, 17], [60, 61, 62, 63, 64], [130, 2, 88]]


def letters() -> Any:
    """A tokenizer that writes each id as one Chinese character, without anything between them."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({letter(token): token for token in range(VOCAB)}, unk_token=letter(0)))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def letter(token: int) -> str:
    return chr(0x4E00 + token)


def check_stop_texts(whole: Sequence[Any], stopped: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> None:
    """Generations with stop texts of two tokens each against those without: the same tokens and log-probs up to the first of the texts."""
    cuts = 0
    for one, other in zip(whole, stopped, strict=True):
        ends = [end for end in range(2, len(one.token_ids) + 1) if tuple(one.token_ids[end - 2 : end]) in pairs]
        end = min(ends, default=len(one.token_ids))
        cuts += bool(ends)
        assert other.token_ids == one.token_ids[:end]
        assert torch.allclose(torch.tensor(other.logprobs), torch.tensor(one.logprobs[:end]), atol=1e-4)
        assert other.finish_reason == ("stop" if ends else one.finish_reason)
    assert 0 < cuts < len(whole), "the texts end some of the responses"


def write_model(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random two-layer model with large weights, so that its distributions are peaked, vary, and sample EOS."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": "_tied" in name,
        "eos_token_id": EOS,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.12,
    }
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = {
        "qwen2": lambda: Qwen2Config(**common),
        "qwen2_tied": lambda: Qwen2Config(**common),
        "qwen3": lambda: Qwen3Config(**common, head_dim=32, rope_parameters=yarn),
        "qwen3_moe": lambda: Qwen3MoeConfig(**common, head_dim=32, **experts),
        "llama_tied": lambda: LlamaConfig(**common, head_dim=32, rope_parameters=scaling),
    }[name.removesuffix(STORED_TWICE)]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _causal_lm().from_config(config, dtype=dtype)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    if name.endswith(STORED_TWICE):
        tensors = load_file(folder / "model.safetensors")
        save_file(
            tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors", {"format": "pt"}
        )
    return folder


def write_reward_model(policy: Path, folder: Path) -> None:
    """Write a reward model with a different trunk than ``policy``: a sequence classifier with one label, whose head has no bias."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model = reward_model_class().from_pretrained(str(policy), num_labels=1, local_files_only=True)
        for parameter in model.parameters():
            parameter.data.add_(0.02 * torch.randn(parameter.shape))
        model.score.weight.data.normal_(std=0.2)
    model.save_pretrained(folder)


def reward_model_class() -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return _causal_lm().from_pretrained(str(folder), dtype=dtype, local_files_only=True).eval().requires_grad_(False)


def _causal_lm() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def make_ids_likely(model: Any, token_ids: Sequence[int], factor: float = 4.0) -> None:
    """Scale the output rows of these ids so that they become likely."""
    model.get_output_embeddings().weight.data[list(token_ids)] *= factor


def exclude_from_softmax(model: Any, token_ids: Sequence[int]) -> None:
    """Set the model's logits of ``token_ids`` to -inf, for the oracles."""
    columns = torch.tensor(list(token_ids))
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, columns, float("-inf")))


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return HF name -> tensor, without a tied head; each expert's, which transformers stacks."""
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            weights[name] = parameter.detach()
            continue
        prefix = name.rpartition(".")[0]
        for expert, both in enumerate(parameter.detach()):
            if name.endswith("down_proj"):
                weights[f"{prefix}.{expert}.down_proj.weight"] = both
            else:
                weights[f"{prefix}.{expert}.gate_proj.weight"], weights[f"{prefix}.{expert}.up_proj.weight"] = both.split(len(both) // 2)
    return weights


def in_buckets(weights: dict[str, Tensor], size: int = 4) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield buckets of ``size`` tensors; layers span bucket boundaries."""
    items = list(weights.items())
    for start in range(0, len(items), size):
        yield [(name, tensor.clone()) for name, tensor in items[start : start + size]]


def change_weights(model: Any, seed: int) -> None:
    """Perturb the weights so that the outputs change clearly."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def logits_of(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Return float64 logits ``[len(response), vocab]`` that predict the response's tokens, from one unpadded forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def logprobs_of(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return float64 log-probs ``[len(response)]`` of the response's tokens at ``temperature``."""
    logits = logits_of(model, prompt, response) / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def greedy_of(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Decode greedily without a KV cache and without ``generate``: the argmax of a full forward pass per token."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + max_tokens:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == EOS:
                break
    return tokens[len(prompt) :]
