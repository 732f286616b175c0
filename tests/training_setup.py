"""Write a model folder with tokenizer, prompt files and a configuration for complete training runs that take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rollout_models import EOS, VOCAB, write_model
from vapo_mcore.config import Config, load_config

SPECIAL = ["<pad>", "<eos>", "<bos>"]
CHARACTERS = SPECIAL + [chr(ord("!") + i) for i in range(94)] + [chr(0xC0 + i) for i in range(VOCAB - len(SPECIAL) - 94)]

HORIZON = (
    "critic.value_pretraining.steps=0",
    "rollout.stop_token_ids=[10, 20, 30, 40, 50, 60, 75, 80, 90, 100, 110, 120]",  # about one token in ten ends a response
    "run.steps=4",
    "run.samples_per_step=24",
    "data.eval=[]",
    "rollout.max_response_length=24",
    "algorithm.policy_loss.importance_correction.kind=token_truncate",
    "checkpoint={every_minutes: 0, every_steps: 1, keep_last: 9}",
)
"""Settings of runs with ``rollout.horizon``, with responses of very different lengths."""

TURNS = (
    "rollout.environment={name: 'tests.integration.environments:letters', max_turns: 3, max_observation_length: 9, "
    "format: '|{observation}|', stop_tokens: [A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, a, b, c, d, e]}"
)
"""With the stop tokens of ``HORIZON`` turns of about four tokens."""


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that maps tokens to characters one to one, so that text determines the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate(CHARACTERS)}
    assert vocabulary["<eos>"] == EOS
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def write_setup(folder: Path, *, model: str = "qwen2") -> Path:
    """Write ``folder``/model, train.jsonl (40 prompts), heldout.jsonl (7, divisible by no layout) and base.yaml, a small VAPO run."""
    write_model(model, folder / "model")
    write_tokenizer(folder / "model")
    for name, first, count in (("train", 1, 40), ("heldout", 60, 7)):
        rows = [{"prompt": f"{n}+{n * 7 % 13}=", "answer": str(n + n * 7 % 13)} for n in range(first, first + count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "base.yaml").write_text(yaml.safe_dump(_settings(folder)), encoding="utf-8")
    return folder


def _settings(folder: Path) -> dict[str, Any]:
    verifier = "tests.integration.grading:divisible_by_three"
    return {
        "seed": 5,
        "run": {"dir": str(folder / "run"), "steps": 2, "samples_per_step": 3, "tensorboard": False},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "parallel": {"world_size": 2},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "mini_batch_size": 8, "max_tokens_per_microbatch": 192},
        "data": {
            "train": [{"kind": "file", "path": str(folder / "train.jsonl"), "verifier": verifier}],
            "eval": [{"kind": "file", "path": str(folder / "heldout.jsonl"), "verifier": verifier}],
            "max_prompt_length": 8,
            "chat_template": False,
        },
        "rollout": {"engine": "transformers", "max_response_length": 40},
        "policy": {"optimizer": {"lr": 1e-3, "warmup_rollouts": 1}},
        "critic": {"head_init": "small", "optimizer": {"lr": 1e-3, "warmup_rollouts": 1}, "value_pretraining": {"steps": 2}},
        "eval": {"samples_per_prompt": 2, "top_p": 1.0},
    }


def training_config(folder: Path, name: str, *overrides: str) -> Config:
    """Load ``folder``/base.yaml with run directory ``folder``/``name`` and ``key.path=value`` settings."""
    return load_config(folder / "base.yaml", [f"run.dir={folder / name}", *overrides])


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def repeatable_rows(run: Path) -> list[dict[str, Any]]:
    """The metrics without times and memory, which differ from run to run."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "memory/")) and key != "tokens/per_second"}
        for row in read_metrics(run)
    ]


def exported_weights(run: Path) -> dict[str, bytes]:
    """The safetensors files of a run's export."""
    return {path.name: path.read_bytes() for path in (run / "export" / "hf").glob("*.safetensors")}


def read_samples(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_same_means(found: list[float | None], expected: list[float | None], name: str, rel: float = 1e-4, abs: float = 1e-5) -> None:
    """Compare a list-valued metric: the same bins are empty, and the other numbers agree."""
    assert [x is None for x in found] == [x is None for x in expected], name
    pairs = [(one, other) for one, other in zip(found, expected, strict=True) if one is not None]
    assert [one for one, _ in pairs] == pytest.approx([other for _, other in pairs], rel=rel, abs=abs), name
