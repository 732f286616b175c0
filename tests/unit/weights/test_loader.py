"""Small HF models through loading, TP shards and back are bit-identical; wrong checkpoints are refused by tensor name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.weights.models import FAMILIES, Chunk, hf_config, layout, read_safetensors
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.loader import SMALL_HEAD_OUTPUT_STD, load_hf_into
from vapo_mcore.weights.plan import global_parameters, match_parameters, plan_mapping

Folder = Callable[[str], Path]


def changed(source: Path, target: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """A copy of a model folder with keys of its config replaced and tensors replaced, added or (None) removed."""
    shutil.copytree(source, target)
    content = {**read_safetensors(source), **tensors}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, target / "model.safetensors")
    merged = {**json.loads((source / "config.json").read_text()), **(config or {})}
    (target / "config.json").write_text(json.dumps(merged))
    return target


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", FAMILIES)
def test_loaded_shards_give_the_checkpoint_back(model: str, tp: int, hf_folder: Folder) -> None:
    folder = hf_folder(model)
    arch = read_architecture(folder)
    ranks = []
    for rank in range(tp):
        chunk = Chunk(arch, "policy", tp=tp)
        report = load_hf_into([chunk], folder, arch, layout(tp, rank), role="policy")
        assert report.parameters == len(list(chunk.parameters()))
        assert report.num_bytes == 2 * sum(parameter.numel() for parameter in chunk.parameters())
        ranks.append(match_parameters(plan_mapping(arch, "policy"), global_parameters([chunk])))
    back: dict[str, Tensor] = {}
    for index, entry in enumerate(plan_mapping(arch, "policy")):
        if not entry.tied_copy:
            full = entry.functions.unshard([shards[index].detach() for shards in ranks], arch)
            back.update(zip(entry.hf_names, entry.functions.split(full, arch), strict=True))
    expected = read_safetensors(folder)
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), name


def test_values_are_cast_to_the_parameters_type(hf_folder: Folder) -> None:
    folder = hf_folder("qwen2")
    arch = read_architecture(folder)
    chunk = Chunk(arch, "policy", dtype=torch.float32)
    load_hf_into([chunk], folder, arch, layout(), role="policy")
    assert torch.equal(chunk.get_submodule("output_layer").weight[:101].bfloat16(), read_safetensors(folder)["lm_head.weight"])


def test_tied_copy_of_the_last_stage_is_filled(hf_folder: Folder) -> None:
    folder = hf_folder("qwen2_tied")
    arch = read_architecture(folder)
    stage = Chunk(arch, "policy", first=False)
    plan = plan_mapping(arch, "policy")
    embedding = Chunk(arch, "policy", layers=range(0), last=False)
    load_hf_into([embedding, stage], folder, arch, layout(), role="policy")
    assert torch.equal(stage.get_submodule("output_layer").weight, embedding.get_submodule("embedding.word_embeddings").weight)
    assert plan[-1].tied_copy


class TestCritic:
    def test_new_heads(self, hf_folder: Folder) -> None:
        folder = hf_folder("qwen2_tied")
        arch = read_architecture(folder)
        heads = {}
        for head_init, seed in (("zero", 0), ("small", 0), ("small", 1)):
            chunks = [Chunk(arch, "critic", tp=2) for _ in range(2)]
            for rank, chunk in enumerate(chunks):
                report = load_hf_into([chunk], folder, arch, layout(2, rank), role="critic", head_init=head_init, seed=seed)  # type: ignore[arg-type]
                assert report.head == head_init
                assert all(torch.isfinite(parameter).all() for parameter in chunk.parameters())
            first, second = (chunk.get_submodule("output_layer") for chunk in chunks)
            assert torch.equal(first.weight, second.weight)
            assert first.bias.item() == 0.0
            heads[head_init, seed] = first.weight.detach()
        assert not heads["zero", 0].any()
        assert not torch.equal(heads["small", 0], heads["small", 1])
        expected = SMALL_HEAD_OUTPUT_STD / arch.hidden_size**0.5
        assert heads["small", 0].std().item() == pytest.approx(expected, rel=0.4)

    @pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
    def test_head_of_a_reward_model(self, kind: str, tmp_path: Path) -> None:
        import transformers

        config = hf_config("qwen2")
        config.num_labels = 1
        torch.manual_seed(3)
        hf = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
        with torch.no_grad():
            for parameter in hf.score.parameters():
                parameter.normal_()
        hf.save_pretrained(tmp_path)
        arch = read_architecture(tmp_path)
        chunk = Chunk(arch, "critic", dtype=torch.float32)
        report = load_hf_into([chunk], tmp_path, arch, layout(), role="critic")
        head = chunk.get_submodule("output_layer")
        assert torch.equal(head.weight, hf.score.weight)
        assert head.bias.item() == (0.0 if kind == "SequenceClassification" else hf.score.bias.item())
        assert report.head == ("score.weight" if kind == "SequenceClassification" else "score.weight + score.bias")
        replaced = load_hf_into([chunk], tmp_path, arch, layout(), role="critic", head_init="zero")
        assert replaced.dropped["score.weight"] == "the value head is newly initialised"
        assert not head.weight.any()

    def test_policy_folder_without_head_init(self, hf_folder: Folder) -> None:
        folder = hf_folder("qwen2")
        arch = read_architecture(folder)
        with pytest.raises(CheckpointError, match="head_init zero or small"):
            load_hf_into([Chunk(arch, "critic")], folder, arch, layout(), role="critic")


class TestDamagedCheckpoints:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_not_finite(self, bad: float, hf_folder: Folder, tmp_path: Path) -> None:
        name = "model.layers.1.self_attn.v_proj.weight"
        tensor = read_safetensors(hf_folder("qwen3"))[name].clone()
        tensor[-1, -1] = bad
        folder = changed(hf_folder("qwen3"), tmp_path / "bad", **{name: tensor})
        arch = read_architecture(folder)
        with pytest.raises(CheckpointError, match=f"NaN or infinite weights in {name};"):
            load_hf_into([Chunk(arch, "policy")], folder, arch, layout(), role="policy")

    def test_wrong_number_of_kv_heads(self, hf_folder: Folder, tmp_path: Path) -> None:
        folder = changed(hf_folder("llama"), tmp_path / "bad", {"num_key_value_heads": 4})
        arch = read_architecture(folder)
        with pytest.raises(
            CheckpointError, match=r"k_proj.weight has shape \[16, 32\], expected \[32, 32\](.|\n)*check num_key_value_heads = 4"
        ):
            load_hf_into([Chunk(arch, "policy")], folder, arch, layout(), role="policy")

    def test_tied_checkpoint_with_an_output_layer(self, hf_folder: Folder, tmp_path: Path) -> None:
        embedding = read_safetensors(hf_folder("llama_tied"))["model.embed_tokens.weight"]
        folder = changed(hf_folder("llama_tied"), tmp_path / "same", **{"lm_head.weight": embedding.clone()})
        arch = read_architecture(folder)
        report = load_hf_into([Chunk(arch, "policy")], folder, arch, layout(), role="policy")
        assert report.dropped == {"lm_head.weight": "tied to the embedding"}
        other = embedding.clone()
        other[-1, 0] += 1
        folder = changed(hf_folder("llama_tied"), tmp_path / "other", **{"lm_head.weight": other})
        with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
            load_hf_into([Chunk(arch, "policy", tp=2)], folder, arch, layout(2, 1), role="policy")
        folder = changed(hf_folder("llama_tied"), tmp_path / "short", **{"lm_head.weight": embedding[:-1].clone()})
        with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
            load_hf_into([Chunk(arch, "policy")], folder, arch, layout(), role="policy")

    def test_a_layer_that_the_model_lacks(self, hf_folder: Folder) -> None:
        folder = hf_folder("llama")
        arch = read_architecture(folder)
        with pytest.raises(CheckpointError, match=r"Megatron model lacks \(6\):\n    decoder.layers.2.input_layernorm.weight"):
            load_hf_into([Chunk(arch, "policy", layers=range(2))], folder, arch, layout(), role="policy")
