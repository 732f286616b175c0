"""A critic with another layout than the policy's (``critic.parallel``) is planned in its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.torchrun import ROOT
from vapo_mcore.config import Config, load_config
from vapo_mcore.config.architecture import ModelArchitecture, new_critic
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.planning.devices import DEVICES
from vapo_mcore.planning.measure import build_state, pipeline_rank
from vapo_mcore.planning.planner import Cluster, Plan, Planner, Subject, _stages_of_ranks, candidate_changes
from vapo_mcore.planning.state import (
    Role,
    configured_state,
    fullest_node,
    num_parameters,
    offload_host_bytes,
    snapshot_bytes,
    snapshot_host_bytes,
)
from vapo_mcore.planning.workload import packed_lengths, workload

POLICY = "parallel={world_size: 16, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 4}"
SAME = "critic.parallel={tensor_model_parallel_size: 2, pipeline_model_parallel_size: 4}"
OTHER = "critic.parallel={pipeline_model_parallel_size: 2, context_parallel_size: 2}"
ROLES: tuple[Role, ...] = ("policy", "critic")


def config_of(*overrides: str) -> Config:
    return load_config(ROOT / "examples/configs/qwen2.5_32b_vapo.yaml", [POLICY, *overrides], check_paths=False)


def small() -> ModelArchitecture:
    return replace(find_architecture("qwen2.5-0.5b"), num_layers=4)


def plan_of(*overrides: str, critic: ModelArchitecture | None = None) -> Plan:
    config = config_of(*overrides)
    subject = Subject(config, small(), critic or new_critic(config, small()), 4000)
    return Planner().plan(subject, Cluster.of(16, 8, DEVICES["h100"]), build=False)


def test_each_rank_has_a_stage_of_both_models() -> None:
    def stages(*overrides: str) -> list[tuple[int, ...]]:
        return [tuple(stages.values()) for stages in _stages_of_ranks(config_of(*overrides), ROLES)]

    assert stages() == stages(SAME) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert stages(OTHER) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert stages("critic.parallel={}") == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_work_of_the_critic_by_hand() -> None:
    work = workload(config_of("critic.parallel={context_parallel_size: 2}"), 4000)
    tokens = 8192 * (1024 + 4000)
    assert (work.tokens_per_data_rank, work.of("critic").tokens_per_data_rank) == (tokens // 2, tokens // 8)
    cap = int(0.97 * config_of().batch.max_tokens_per_microbatch)
    assert [work.of(role).microbatches_per_update for role in ROLES] == [-(-(tokens // 16 // ranks) // cap) for ranks in (2, 8)]
    lengths = packed_lengths(config_of("critic.parallel={context_parallel_size: 2}", "data.max_prompt_length=1026"), work, "critic")
    assert all(length % 4 == 0 for length in lengths)
    assert workload(config_of(), 4000).of("critic") == workload(config_of(), 4000)


def test_the_same_layout_written_out_is_no_second_one() -> None:
    shared, own = plan_of(), plan_of(SAME)
    assert (own.ranks, own.step, own.host, own.work) == (shared.ranks, shared.step, shared.host, shared.work)


def test_what_a_second_layout_takes() -> None:
    """Communicators of the critic's two groups larger than one, and the tokens that its data-parallel ranks own."""
    device = DEVICES["h100"]
    shared, own = plan_of(), plan_of("critic.parallel={pipeline_model_parallel_size: 4}")
    more = own.work.of("critic").tokens_per_data_rank * (8 + 2 + 8 + 8 + 1 + 8 + 5 * 8 + 1)  # and the same again in micro-batches
    for mine, theirs in zip(own.ranks, shared.ranks, strict=True):
        assert mine["values"].parts["CUDA, NCCL"] - theirs["values"].parts["CUDA, NCCL"] == pytest.approx(2 * device.nccl_bytes)
        assert mine["values"].parts["rollout batch"] - theirs["values"].parts["rollout batch"] == more


def test_a_dense_critic_in_its_layout() -> None:
    """Beside a policy of four stages, whole on each rank, of another architecture: its weights, gradients and passes are its own."""
    critic = replace(find_architecture("qwen2.5-1.5b"), num_layers=2, tie_word_embeddings=False, vocab_size=small().vocab_size)
    plan = plan_of("critic.parallel={}", critic=critic)
    expected = configured_state(plan.subject.config, critic, "critic", stage=0, overlap=True)
    for rank in plan.ranks:
        parts = rank["critic_update"].parts
        assert parts["critic weights"] == expected[0].params == pytest.approx(2 * num_parameters(critic, "critic"), rel=0.01)
        assert parts["critic optimizer"] == max(state.optimizer for state in expected)
        assert rank["policy_update"].parts["policy weights"] < num_parameters(small())
    alone = plan_of(critic=critic)
    assert plan.step.phases["policy_update"] == alone.step.phases["policy_update"]
    assert plan.step.phases["critic_update"] != alone.step.phases["critic_update"]


def test_states_are_those_of_megatrons_buffers_in_both_layouts() -> None:
    config, arch = config_of(OTHER), small()
    for role in ROLES:
        layout = config.parallel_of(role)
        for stage in range(layout.pipeline_model_parallel_size):
            with pipeline_rank(layout, stage) as parallel:
                built = build_state(config, role, arch, parallel, on_gpu=True).by_data_rank
            assert list(built) == configured_state(config, arch, role, stage=stage, overlap=True)


def test_host_memory_adds_up_what_each_rank_has_of_both() -> None:
    """Node 0 of two has the first two of the policy's four stages and, whatever its layout, what the critic has on the same eight ranks."""
    arch, one = small(), config_of()
    assert offload_host_bytes(config_of(SAME), arch, processes_per_node=8) == offload_host_bytes(one, arch, processes_per_node=8)
    assert snapshot_host_bytes(config_of(SAME), arch, processes_per_node=8) == snapshot_host_bytes(one, arch, processes_per_node=8)
    config = config_of(OTHER, "checkpoint.every_steps=1")
    ranks = [0] * 16
    for role in ROLES:
        layout = config.parallel_of(role)
        for rank in range(16):
            stage, inside = divmod(rank, 16 // layout.pipeline_model_parallel_size)
            held = snapshot_bytes(arch, role, config.model.dtype, layout, stage=stage, overlap=True)
            ranks[rank] += held[inside // layout.tensor_model_parallel_size]
    expected = max(sum(ranks[:8]), sum(ranks[8:]))
    assert snapshot_host_bytes(config, arch, processes_per_node=8, cuda=True) == expected == fullest_node(ranks, 8)


def test_misfits_name_the_stages_and_changes_the_critic_s_degrees() -> None:
    huge = replace(find_architecture("qwen2.5-72b"), vocab_size=small().vocab_size)
    plan = plan_of("critic.parallel={}", critic=huge)
    assert any("on a rank of the policy's pipeline stage 0 and the critic's 0" in misfit for misfit in plan.misfits)
    tried = [setting for settings in candidate_changes(plan.subject, plan.cluster) for setting in settings]
    assert "critic.parallel.tensor_model_parallel_size=8" in tried and "parallel.tensor_model_parallel_size=4" in tried
    assert not any("critic.parallel" in setting for settings in candidate_changes(plan_of().subject, plan.cluster) for setting in settings)
