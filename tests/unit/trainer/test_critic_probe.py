"""Which prompts the critic's probe takes, and which it refuses (what it measures: tests/integration/test_train_step.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.data.test_prompts import character_tokenizer
from vapo_mcore.config.schema import DataConfig, ProbeConfig
from vapo_mcore.data.prompts import PromptDataset
from vapo_mcore.errors import DataError
from vapo_mcore.trainer.critic_probe import probe_prompts

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def datasets(folder: Path, train: list[str], held_out: list[str]) -> tuple[PromptDataset, PromptDataset]:
    """With a chat template, so that the text that is tokenized is not the prompt."""
    sources = []
    for name, prompts in (("train", train), ("held_out", held_out)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts), encoding="utf-8")
        sources.append([{"kind": "file", "path": str(path), "verifier": "exact"}])
    config = DataConfig.model_validate({"train": sources[0], "eval": sources[1], "max_prompt_length": 100, "chat_template": True})
    tokenizer = character_tokenizer(TEMPLATE)
    return PromptDataset(config, "train", tokenizer, seed=0), PromptDataset(config, "eval", tokenizer, seed=0)


def config_with(prompts: int) -> Any:
    return SimpleNamespace(uses_critic=True, critic=SimpleNamespace(probe=ProbeConfig(prompts=prompts)))


def test_prompts_are_spread_over_the_set(tmp_path: Path) -> None:
    train, held_out = datasets(tmp_path, ["a"], [f"question {n}" for n in range(10)])
    assert [prompt.prompt_id.rpartition("/")[2] for prompt in probe_prompts(config_with(4), train, held_out)] == ["1", "3", "6", "8"]


def test_a_training_prompt_among_them_is_refused(tmp_path: Path) -> None:
    """By the prompt itself, without regard to case and whitespace; prompts of the set that the probe leaves out may be shared."""
    train, held_out = datasets(tmp_path, ["Question  2", "question 1", "x"], [f"question {n}" for n in range(4)])
    with pytest.raises(DataError, match=r"2 of its 4 prompts are training prompts \(held_out/2, held_out/3\)"):
        probe_prompts(config_with(4), train, held_out)
    assert len(probe_prompts(config_with(1), train, held_out)) == 1


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    train, held_out = datasets(tmp_path, ["a"], ["b", "c"])
    with pytest.raises(DataError, match=r"critic\.probe\.prompts = 3, but data.eval has 2 prompts"):
        probe_prompts(config_with(3), train, held_out)
