"""Loading and exporting through real Megatron models on four ranks: every layout gives the checkpoint back bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.forks import run_ranks, run_script
from tests.torchrun import ROOT, run_bounded, run_torchrun
from tests.unit.weights.models import FAMILIES, hf_config

WORKER = Path(__file__).with_name("worker.py")
MOE_WORKER = Path(__file__).with_name("moe_worker.py")
LOGITS_WORKER = Path(__file__).with_name("logits_worker.py")
SMOLLM2 = ROOT / "models" / "smollm2-135m"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
META_WORKER = Path(__file__).with_name("meta_worker.py")
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


def test_plans_of_large_models_fit_megatron_at_tp8_pp4() -> None:
    result = run_script(META_WORKER, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^model (\S+): \d+ parameters$", result.stdout, re.MULTILINE) == [
        "qwen2.5-32b",
        "qwen3-32b",
        "llama-3.3-70b",
        "qwen3-30b-a3b",
    ]


def test_experts_at_every_expert_parallel_degree(tmp_path: Path) -> None:
    """``dist_checkpointing`` loads a converted mixture of experts in each layout, and what it saves there converts back."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=75,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=128,
    )
    torch.manual_seed(8)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "model")
    result = run_ranks(MOE_WORKER, 4, str(tmp_path), timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.findall(r"^case (\w+) ok$", result.stdout, re.MULTILINE) == ["ep4", "tp2_ep2", "pp2_ep2", "tp2_pp2"]


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*"abcdefghijklmnopqrstuvwxyz0123456789", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def test_logits_of_every_family_are_those_of_transformers(tmp_path: Path) -> None:
    """In float32, within 1e-5, texts of one token included; SmolLM2 too where it has been fetched."""
    import transformers

    folders = []
    trained = [name for name in FAMILIES if name != "llama_biased"]  # training supports no bias on the attention output
    for name in (*trained, "llama3", "critic"):
        config = hf_config({"llama3": "llama", "critic": "qwen2"}.get(name, name))
        if name == "llama3":
            config.rope_parameters = LLAMA3_ROPE
        if name == "critic":
            config.num_labels = 1
        torch.manual_seed(len(name))
        kind = transformers.AutoModelForTokenClassification if name == "critic" else transformers.AutoModelForCausalLM
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(mean=float(parameter_name.endswith("norm.weight")), std=0.2)
        model.save_pretrained(tmp_path / name)
        add_tokenizer(tmp_path / name)
        folders.append(tmp_path / name)
    if SMOLLM2.is_dir():
        folders.append(SMOLLM2)
    result = run_script(LOGITS_WORKER, *map(str, folders), timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == [folder.name for folder in folders]
    for name, tokens, largest, _, agreement in lines:
        assert int(tokens) > 50
        assert float(largest) <= 1e-5, (name, largest)
        assert agreement == ("None" if name == "critic" else "1.0")


@pytest.mark.slow
def test_verify_compares_logits_of_transformers_and_megatron(tmp_path: Path) -> None:
    """The command in a process of its own: equal models give exit code 0 and differences of rounding, another model gives 1."""
    torch.manual_seed(6)
    make_models(tmp_path)
    add_tokenizer(tmp_path / "model_qwen3")
    (tmp_path / "texts.txt").write_text("abc\n\nthe quick brown fox 42\nz\n")
    command = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]
    source, megatron = str(tmp_path / "model_qwen3"), str(tmp_path / "megatron")
    converted = run_bounded([*command, "hf-to-megatron", source, megatron], timeout=120)
    assert converted.returncode == 0, converted.stderr
    result = run_bounded([*command, "verify", "--logits", source, megatron, "--text", str(tmp_path / "texts.txt")], timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    largest = re.search(r"^26 tokens: largest difference (\S+), mean \S+, top-1 agreement 100.00%$", result.stdout, re.MULTILINE)
    assert largest is not None, result.stdout
    assert float(largest[1]) <= 1e-4  # logits of this model are of order 10
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "model_qwen3", other)
    weights = load_file(other / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"].flip(0)}, other / "model.safetensors")
    result = run_bounded([*command, "verify", "--logits", str(other), megatron], timeout=120)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "NOT equal within 1e-05" in result.stdout
