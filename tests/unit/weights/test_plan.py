"""The plan covers a checkpoint exactly: every difference is named, nothing is skipped silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.weights.models import FAMILIES, Chunk, make_arch, read_safetensors
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.plan import check_bijection, global_parameters, hf_manifest, match_parameters, plan_mapping, require_complete


@pytest.mark.parametrize("model", FAMILIES)
def test_plan_names_and_shapes_are_those_that_transformers_saves(model: str, hf_folder: Callable[[str], Path]) -> None:
    folder = hf_folder(model)
    saved = {name: tuple(tensor.shape) for name, tensor in read_safetensors(folder).items()}
    assert hf_manifest(plan_mapping(read_architecture(folder), "policy")) == saved


def test_every_fault_is_named_at_once() -> None:
    arch = make_arch()
    plan = plan_mapping(arch, "policy")
    found = dict(hf_manifest(plan))
    del found["model.layers.1.mlp.up_proj.weight"]
    found["model.layers.0.self_attn.k_proj.weight"] = (16, 16)
    found["model.layers.2.mlp.up_proj.weight"] = (24, 16)
    with pytest.raises(CheckpointError) as caught:
        check_bijection(plan, found, arch=arch, role="policy", where="some/folder")
    message = str(caught.value)
    assert "some/folder" in message
    assert "missing tensors (1):\n    model.layers.1.mlp.up_proj.weight" in message
    assert "without a mapping rule (1):\n    model.layers.2.mlp.up_proj.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight has shape [16, 16], expected [8, 16]" in message
    assert "num_key_value_heads = 2" in message


def test_long_lists_of_faults_are_counted() -> None:
    arch = make_arch(num_layers=4)
    with pytest.raises(CheckpointError, match=r"missing tensors \(39\)(.|\n)*and 27 more"):
        check_bijection(plan_mapping(arch, "policy"), {}, arch=arch, role="policy", where="x")


def test_what_is_left_unused_is_stated() -> None:
    arch = make_arch(tie_word_embeddings=True)
    plan = plan_mapping(arch, "policy")
    found = {
        **hf_manifest(plan),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
        "model.rotary_emb.inv_freq": (2,),
        "lm_head.weight": (37, 16),
    }
    result = check_bijection(plan, found, arch=arch, role="policy", where="x")
    assert result.tied_duplicate
    assert set(result.dropped) == set(found) - set(hf_manifest(plan))
    critic = check_bijection(plan_mapping(arch, "critic"), found, arch=arch, role="critic", where="x", new_head=True)
    assert critic.dropped["lm_head.weight"] == "a critic has no language-model head"
    assert not critic.tied_duplicate


def test_reward_model_folder_is_no_policy_and_policy_folder_has_no_value_head() -> None:
    arch = make_arch()
    policy, critic = plan_mapping(arch, "policy"), plan_mapping(arch, "critic")
    with pytest.raises(CheckpointError, match="can initialise a critic, but not a policy"):
        check_bijection(policy, hf_manifest(critic), arch=arch, role="policy", where="x")
    with pytest.raises(CheckpointError, match=r"missing tensors \(1\):\n    score.weight\n(.|\n)*head_init zero or small"):
        check_bijection(critic, hf_manifest(policy), arch=arch, role="critic", where="x")


def test_pipeline_stages_get_global_layer_numbers() -> None:
    arch = make_arch(num_layers=5, tie_word_embeddings=True)
    plan = plan_mapping(arch, "policy")
    first = Chunk(arch, "policy", layers=range(2), last=False)
    last = [Chunk(arch, "policy", layers=range(2, 3), first=False, last=False), Chunk(arch, "policy", layers=range(3, 5), first=False)]
    held = [match_parameters(plan, global_parameters(chunks)) for chunks in ([first], last)]
    require_complete(plan, [*held[0], *held[1]])
    assert not set(held[0]) & set(held[1])
    assert {plan[index].mcore_name for index in held[1]} >= {"decoder.layers.4.mlp.linear_fc1.weight", "output_layer.weight"}
    with pytest.raises(CheckpointError, match="Megatron model lacks"):
        require_complete(plan, held[0])


def test_transformer_engine_names_are_the_same_parameters() -> None:
    arch = make_arch(family="qwen3_moe", num_experts=3, num_experts_per_token=1, moe_ffn_hidden_size=8)
    plan = plan_mapping(arch, "policy")
    local, fused = (match_parameters(plan, global_parameters([Chunk(arch, "policy", spelling=spelling)])) for spelling in (0, 1))
    assert set(local) == set(fused) == {index for index, entry in enumerate(plan)}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in dict(Chunk(arch, "policy", spelling=1).named_parameters())


def test_local_experts_get_global_numbers() -> None:
    arch = make_arch(family="qwen3_moe", num_experts=4, num_experts_per_token=1, moe_ffn_hidden_size=8)
    for spelling in (0, 1):
        few = Chunk(
            make_arch(family="qwen3_moe", num_experts=2, num_experts_per_token=1, moe_ffn_hidden_size=8), "policy", spelling=spelling
        )
        names = {plan_entry.hf_names[-1] for plan_entry in _held(arch, few) if plan_entry.is_expert}
        assert names == {f"model.layers.{n}.mlp.experts.{e}.{p}_proj.weight" for n in (0, 1) for e in (2, 3) for p in ("up", "down")}


def _held(arch, chunk):  # type: ignore[no-untyped-def]
    plan = plan_mapping(arch, "policy")
    return [plan[index] for index in match_parameters(plan, global_parameters([chunk], expert_offset=2))]


def test_a_parameter_without_a_rule_is_named() -> None:
    chunk = Chunk(make_arch(), "policy")
    chunk.get_submodule("decoder.layers.0.mlp").register_parameter("surprise", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"without a mapping rule \(1\):\n    decoder.layers.0.mlp.surprise"):
        match_parameters(plan_mapping(make_arch(), "policy"), global_parameters([chunk]))
