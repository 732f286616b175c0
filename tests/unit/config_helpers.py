"""A small valid configuration with its model folder and data files, for the tests of config and command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vapo_mcore.config import Config, load_config
from vapo_mcore.errors import ConfigError

QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 264,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

BASE = """
run: {{dir: {folder}/run, steps: 6}}
model: {{path: {folder}/model, dtype: float32}}
batch: {{prompts_per_step: 16, responses_per_prompt: 8, mini_batch_size: 64, max_tokens_per_microbatch: 4096}}
data:
  train: [{{kind: file, path: {folder}/train.jsonl, verifier: math}}]
  eval: [{{kind: reasoning_gym, task: chain_sum, size: 10}}]
  max_prompt_length: 64
rollout: {{max_response_length: 160}}
"""


def write_model_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**QWEN2, **changes}))


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_model_config(folder, **changes)
    for name in ("model.safetensors", "tokenizer.json"):  # their contents are for those who load them
        (folder / name).touch()
    return folder


def write_base(folder: Path) -> Path:
    """``base.yaml`` in ``folder``, with the files that it names."""
    write_model(folder / "model")
    (folder / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    path = folder / "base.yaml"
    path.write_text(BASE.format(folder=folder))
    return path


def write_child(folder: Path, text: str, name: str = "child.yaml") -> Path:
    """A file that extends base.yaml."""
    path = folder / name
    path.write_text("extends: base.yaml\n" + text)
    return path


def load(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "base.yaml", overrides)


def faults_of(folder: Path, *overrides: str, file: str = "base.yaml") -> list[str]:
    """The fault lines of a configuration that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(folder / file, overrides)
    head, *lines = str(caught.value).split("\n")
    assert head.endswith(": 1 fault" if len(lines) == 1 else f": {len(lines)} faults")
    return [line.strip() for line in lines]
