"""Write a model folder with random weights, a tokenizer, prompts and a recipe, for machines without files (``gpu_step.py``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Shape of the model and of a step: ``prompt``, ``response`` and ``microbatch`` in tokens, ``responses`` of each prompt."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    dtype: str
    prompt: int
    response: int
    microbatch: int
    responses: int


SMALL = Size(2, 128, 256, 4, 2, 512, "float32", prompt=64, response=48, microbatch=256, responses=4)
QWEN_1_5B = Size(28, 1536, 8960, 12, 2, 151936, "bfloat16", prompt=512, response=2048, microbatch=16384, responses=16)
"""The shape of Qwen2.5-1.5B."""


def write_model(folder: Path, size: Size) -> None:
    """Write a Qwen2 model and a tokenizer with a token for each of its ids.

    Random weights of the usual size give a model that hardly attends and predicts every token alike, so that errors would not show: these
    are drawn so that queries, keys and logits have a standard deviation near 1.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=32768,
        rope_theta=1e6,
        initializer_range=1.2 / size.hidden**0.5,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype=size.dtype,
    )
    Qwen2ForCausalLM(config).to(getattr(torch, size.dtype)).save_pretrained(folder)
    _write_tokenizer(folder, size.vocab)
    generation = {"eos_token_id": [SPECIAL.index("<eos>"), SPECIAL.index("<|im_end|>")], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of bytes, the special tokens, and names for the other ids, which no text contains."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused {number}>" for number in range(vocab - len(names))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(SPECIAL[2:])
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_recipe(folder: Path, model: Path, size: Size, engine: str) -> Path:
    """Write prompts and a VAPO recipe for one process with everything at its default that depends on the device."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"What is {n} + {n * 7 % 13}?", "answer": str(n + n * 7 % 13)} for n in range(1, 65)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe: dict[str, Any] = {
        "seed": 1,
        "run": {"dir": str(folder / "run"), "steps": 1, "tensorboard": False},
        "model": {"path": str(model), "dtype": size.dtype},
        "parallel": {"world_size": 1},
        "batch": {
            "prompts_per_step": 4,
            "responses_per_prompt": size.responses,
            "mini_batch_size": 2 * size.responses,
            "max_tokens_per_microbatch": size.microbatch,
        },
        "data": {"train": [{"kind": "file", "path": str(prompts), "verifier": "math"}], "max_prompt_length": size.prompt},
        "rollout": {"engine": engine, "max_response_length": size.response},
        "policy": {"optimizer": {"lr": 1e-6, "warmup_rollouts": 0}},
        "critic": {"head_init": "small", "optimizer": {"lr": 1e-6, "warmup_rollouts": 0}},
        "reward": {"workers": 1},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file
