"""Loading and exporting through real Megatron models on four ranks: every layout gives the checkpoint back bit for bit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.torchrun import run_torchrun

WORKER = Path(__file__).with_name("worker.py")
LAYOUTS = ("tp2_pp2", "tp4", "pp2_vpp2_dp2", "pp4", "tp2_cp2")


def make_models(folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    sizes = {
        "vocab_size": 75,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    models = {
        "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
        "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 24}),
        "llama_one_kv_head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": None, "num_key_value_heads": 4}),
    }
    for name, (family, changes) in models.items():
        config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.save_pretrained(folder / f"model_{name}")


@pytest.mark.slow
def test_every_layout_gives_the_checkpoint_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    make_models(tmp_path)
    result = run_torchrun(WORKER, 4, str(tmp_path), timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    names = re.findall(r"^def (case_\w+)", WORKER.read_text(), re.MULTILINE)
    expected = {(layout, name) for layout in LAYOUTS for name in names}
    assert set(re.findall(r"^case (\w+) (\w+) ok$", result.stdout, re.MULTILINE)) == expected
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "saved_tp2_pp2")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model_qwen2")
    tokens = torch.arange(20)[None]
    assert policy.dtype == torch.bfloat16
    assert torch.equal(policy(tokens).logits, original(tokens).logits)
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic_tp2_pp2", dtype=torch.float32)
    assert critic.num_labels == 1
    assert critic.score.bias.item() == 0.25
    assert critic.score.weight.abs().sum() > 0
