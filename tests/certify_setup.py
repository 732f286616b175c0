"""A tiny model with a chat template, sums graded by the math verifier, and a configuration, for ``vapo-mcore certify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.rollout_models import EOS, VOCAB, write_model
from vapo_mcore.config import Config, load_config

SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
END_OF_TURN = 4
CHARACTERS = [*SPECIAL, "Ġ", "Ċ", *(chr(ord("!") + i) for i in range(94))]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OFF_BY_ONE = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant")


def write_certify_setup(folder: Path, *, model: str = "qwen2") -> Path:
    """``folder``/model, train.jsonl (24 sums), empty.jsonl, off_by_one.jinja and base.yaml."""
    write_model(model, folder / "model")
    _write_tokenizer(folder / "model")
    rows = [{"prompt": f"{n}+{n * 7 % 13}=", "answer": str(n + n * 7 % 13)} for n in range(1, 25)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "empty.jsonl").write_text("")
    (folder / "off_by_one.jinja").write_text(OFF_BY_ONE, encoding="utf-8")
    (folder / "base.yaml").write_text(yaml.safe_dump(_settings(folder)), encoding="utf-8")
    return folder


def certify_config(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(folder / "base.yaml", [f"run.dir={folder / name}", *overrides])


def _write_tokenizer(folder: Path) -> None:
    """One token a byte, as in the tokenizers that transformers makes for this kind of model; 30 ids of the model have no token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate(CHARACTERS)}
    assert vocabulary["<eos>"] == EOS and vocabulary["<|im_end|>"] == END_OF_TURN and len(vocabulary) == VOCAB - 30
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "unk_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL[3:], **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "seed": 5,
        "run": {"dir": str(folder / "run"), "steps": 2, "tensorboard": False},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "parallel": {"world_size": 2},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "mini_batch_size": 8, "max_tokens_per_microbatch": 192},
        "data": {"train": [{"kind": "file", "path": str(folder / "train.jsonl"), "verifier": "math"}], "max_prompt_length": 48},
        "rollout": {"engine": "transformers", "max_response_length": 40},
        "policy": {"optimizer": {"lr": 1e-3, "warmup_rollouts": 1}},
        "critic": {"head_init": "small", "optimizer": {"lr": 1e-3, "warmup_rollouts": 1}},
        "reward": {"workers": 1},
    }
