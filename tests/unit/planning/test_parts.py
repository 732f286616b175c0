"""Parts of the plan by hand: what is in flight, live storages, vLLM's share, device tables, the step's size, time that cannot be less."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchrun import ROOT
from vapo_mcore.config import Config, load_config
from vapo_mcore.errors import ConfigError
from vapo_mcore.megatron.offload import RESIDENCY
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.planning.devices import DEVICES, GIB, Device, choose_device
from vapo_mcore.planning.live_bytes import LiveBytes
from vapo_mcore.planning.measure import (
    ActivationProbe,
    ChunkActivations,
    _loss_bytes,
    build_state,
    forward_peak,
    pipeline_rank,
    training_peak,
)
from vapo_mcore.planning.memory import (
    STAGES,
    RankModel,
    build_bytes,
    choice_bytes_a_token,
    choices_host_bytes,
    rank_memory,
    vllm_memory,
    workspace_bytes,
)
from vapo_mcore.planning.planner import Cluster, Plan, Planner, Subject, candidate_changes, single_changes
from vapo_mcore.planning.state import Role, StateBytes, configured_state, num_parameters, snapshot_bytes
from vapo_mcore.planning.timing import StepTimer
from vapo_mcore.planning.workload import packed_lengths, workload


def _config(*overrides: str) -> Config:
    return load_config(ROOT / "examples/configs/qwen2.5_32b_vapo.yaml", overrides, check_paths=False)


def _chunk(saved: int, *, forward: int = 0, peak: int = 0, received: int = 0, output: int = 0, logits: int = 0) -> ChunkActivations:
    return ChunkActivations(saved, forward, peak, saved // 2, received, output, logits)


def test_micro_batches_in_flight() -> None:
    """1F1B: stage s of p holds p - s - 1 besides the one that runs, and never more than there are."""
    chunk = _chunk(10, forward=11, peak=15)
    assert [training_peak([chunk], stage, 4, 8)[0] for stage in range(4)] == [30 + 15, 20 + 15, 10 + 15, 15]
    assert training_peak([chunk], 0, 4, 2)[0] == 10 + 15
    assert training_peak([_chunk(10, forward=19, peak=15)], 3, 4, 8)[0] == 19


def test_micro_batches_in_flight_of_an_interleaved_schedule() -> None:
    """2 stages of 2 chunks a and b, 4 micro-batches: 2 (p - s - 1) + (chunks - 1) p forward passes come first.

    Stage 0: a a b b, then a -b, a -b, b -a, b -a, and -b -b -a -a. Stage 1: a a, then b -b, b -b, a -a, a -a, b -b, b -b, -a -a.
    """
    big, small = _chunk(10, forward=10, peak=10), _chunk(1, forward=1, peak=1)
    # a a b b a, with the first b still there; after -b, a: 4 a and 1 b
    assert training_peak([big, small], 0, 2, 4)[0] == 4 * 10 + 1
    assert training_peak([small, big], 0, 2, 4)[0] == 3 * 1 + 2 * 10  # a a b b a
    assert training_peak([big, small], 1, 2, 4)[0] == 3 * 10  # a a, later -a -a with a third: a a a -a ...
    # What only a backward pass needs counts when that one runs: b's second one, beside a a a a.
    costly = _chunk(1, forward=1, peak=1001)
    assert training_peak([big, costly], 0, 2, 4) == (4 * 10 + 1001, costly)


def test_selective_recomputation_on_a_gpu_gives_up_the_mlp_alone() -> None:
    """Flash attention keeps its results in any case; of the MLP the results [tokens, 2 ffn] and [tokens, ffn] are gone."""
    arch = replace(find_architecture("qwen2.5-0.5b"), num_layers=2, vocab_size=1024)
    tokens, probe = 64, ActivationProbe()
    saved = {
        recompute: probe.chunk(
            _config(
                "parallel.world_size=1",
                "parallel.tensor_model_parallel_size=1",
                "parallel.pipeline_model_parallel_size=1",
                "rollout.tensor_parallel_size=1",
                f"model.recompute={recompute}",
            ),
            "policy",
            arch,
            [tokens],
            first=True,
            last=True,
            layers=2,
            on_gpu=True,
        ).saved
        for recompute in ("none", "selective")
    }
    assert saved["none"] - saved["selective"] == 2 * tokens * 3 * arch.ffn_hidden_size * 2  # layers, tokens, results, bytes


def test_losses_share_a_run_where_they_hold_the_same_bytes() -> None:
    """Coefficients and bounds change nothing; a term, a stored tensor or a measurement more does."""

    def held(*overrides: str, role: Role = "policy") -> tuple[Any, ...]:
        return _loss_bytes(_config(*overrides), role, find_architecture("qwen2.5-32b"), 1000, on_gpu=False)

    plain = held()
    assert plain == held("algorithm.policy_loss.clip_high=0.3", "algorithm.positive_lm.coef=0.2")
    others = [
        held("algorithm.positive_lm.coef=0.0"),
        held("algorithm.entropy.coef=0.01"),
        held("algorithm.kl={place: loss, kind: k3, coef: 0.1}"),
        held("rollout.old_logprobs=rollout"),
        held("algorithm.policy_loss.dual_clip=3.0"),
        held(role="critic"),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_memory_that_stays_between_the_passes() -> None:
    """Rotary tables of both models in every stage; CUDA graphs with vLLM's weights; Megatron's gather buffer where nothing frees it."""
    device = DEVICES["h100"]

    def parts(*overrides: str) -> dict[str, dict[str, float]]:
        config = _config("parallel.tensor_model_parallel_size=4", *overrides)
        model = replace(_model(1000), hidden_size=5120, head_dim=128)
        models: dict[Role, RankModel] = {"policy": model, "critic": model}
        vllm = vllm_memory(config, find_architecture("qwen2.5-32b"), device)
        found = rank_memory(config, models, vllm, workload(config, 4000), device)
        return {stage: memory.parts for stage, memory in found.items()}

    config = _config()
    chunks, longest = len(_model(1000).chunks), config.max_sequence_length
    moving, staying = parts("model.offload=true"), parts("model.offload=false")
    assert {stage: found["rotary tables"] for stage, found in moving.items()} == dict.fromkeys(STAGES, 2 * chunks * longest * 128 * 4)
    assert [stage for stage in STAGES if "CUDA graphs" in moving[stage]] == ["generate", "sync"]
    assert not any("CUDA graphs" in found for found in parts("rollout.vllm.enforce_eager=true").values())
    assert not any("gather buffer" in found for found in moving.values())
    gathered = config.batch.max_tokens_per_microbatch / config.parallel.context_parallel_size * 5120 * 2
    assert {stage: staying[stage]["gather buffer"] for stage in STAGES if "gather buffer" in staying[stage]} == {
        "generate": gathered,
        "sync": gathered,
    }


def test_cuda_graphs_leave_less_kv_cache() -> None:
    device, arch = DEVICES["h100"], find_architecture("qwen2.5-32b")
    graphs, eager = (vllm_memory(_config(f"rollout.vllm.enforce_eager={value}"), arch, device).kv_bytes for value in ("false", "true"))
    assert eager - graphs == pytest.approx(1.5 * GIB)
    assert vllm_memory(_config(), arch, device).kv_bytes == graphs


def test_forward_passes_hold_the_last_output_or_all_inputs() -> None:
    first, last = _chunk(10, output=3, received=0), _chunk(40, output=7, received=2, logits=7)
    assert forward_peak([last]) == (20 + 7, last)
    assert forward_peak([first, last]) == (20 + 2, last)


def test_a_cpu_casts_operands_of_pointwise_operators() -> None:
    total, part = torch.empty(100, device="meta"), torch.empty(100, device="meta", dtype=torch.bfloat16)
    for on_cpu, expected in ((False, 0), (True, 400)):
        with LiveBytes("meta", [total, part], on_cpu=on_cpu) as live:
            total.add_(part)
            total.add_(total)
            part.mul_(2.0)
        assert (live.peak, live.current) == (expected, 0)


def test_gloo_copies_the_inputs_of_a_reduce_scatter() -> None:
    degrees = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    parallel = _config().parallel.model_copy(update={"world_size": 2, "data_parallel_size": 1, **degrees})
    parts = list(torch.empty(100, device="meta").view(2, 50))
    half = torch.empty(50, device="meta")
    for on_cpu, expected in ((False, 0), (True, 400)):
        with pipeline_rank(parallel, 0) as context:
            group = context.tensor_model_parallel_group
            with LiveBytes("meta", [half, parts[0]], on_cpu=on_cpu) as listed:
                dist.reduce_scatter(half, parts, group=group)
            with LiveBytes("meta", [half, parts[0]], on_cpu=on_cpu) as whole:
                dist.reduce_scatter_tensor(half, torch.cat(parts), group=group)
        assert (listed.peak, listed.current) == (expected, 0)
        assert whole.peak == 400 + expected  # the concatenation, too


def test_live_bytes_count_storages_once_until_they_are_freed() -> None:
    weight = torch.empty(100, device="meta")
    with LiveBytes("meta", [weight]) as live:
        product = weight * 2
        view = product[10:].view(9, 10)
        assert live.current == 400
        other = torch.empty(50, dtype=torch.bfloat16, device="meta")
        del product
        assert live.current == 500  # the view keeps the storage
        del view, other
        assert (live.current, live.peak) == (0, 500)
        torch.empty(1000)  # another device
        assert live.peak == 500


def test_device_numbers_can_be_replaced() -> None:
    assert choose_device("h100", ["train_efficiency=0.3", "node_rate=1e11"]).train_efficiency == 0.3
    with pytest.raises(ConfigError, match=r"network=1: unknown; known are memory, .*\n.*flops=-2: '-2' is not a positive number"):
        choose_device("h200", ["network=1", "flops=-2"])


def test_the_step_of_the_paper() -> None:
    work = workload(_config(), 5000)
    assert (work.responses, work.updates, work.tokens) == (8192, 16, 8192 * (1024 + 5000))
    # 512 responses over 8 data-parallel ranks in packs of 22,528 tokens, 97 % full
    assert work.microbatches_per_update == -(-512 * 6024 // 8 // int(0.97 * 22528))
    lengths = packed_lengths(_config(), work)
    assert sum(lengths) == 22528 and max(lengths) == 6024


def test_vllm_shares_by_hand() -> None:
    arch, device = find_architecture("qwen2.5-32b"), DEVICES["h100"]
    whole, half, sixteen = (vllm_memory(_config(f"rollout.tensor_parallel_size={tp}"), arch, device) for tp in (1, 2, 16))
    assert whole.weight_bytes == 2 * num_parameters(arch)
    assert half.weight_bytes == pytest.approx(num_parameters(arch), rel=0.001)
    assert whole.kv_bytes_per_token == 2 * 64 * 8 * 128 * 2
    assert sixteen.kv_bytes_per_token == 2 * 64 * 1 * 128 * 2  # 8 heads: one on each rank, held twice
    assert vllm_memory(_config("rollout.vllm.num_gpu_blocks=1000"), arch, device).kv_tokens == 16000
    assert half.kv_bytes == pytest.approx(0.85 * device.memory - half.weight_bytes - half.workspace_bytes - 1.5 * GIB, abs=2 * GIB)


def _model(scale: int) -> RankModel:
    return RankModel(
        StateBytes(1 * scale, 2 * scale, 3 * scale),
        (ChunkActivations(saved=7, forward=8, peak=11, forward_peak=4, received=1, output=1, logits=2),),
    )


def test_workspaces_of_transformer_engine() -> None:
    """One of 32 MiB, which both models use; grouped experts multiply in four streams with one each."""
    dense, mixture = find_architecture("qwen2.5-32b"), find_architecture("qwen3-30b-a3b")
    h100, cpu, one = DEVICES["h100"], DEVICES["cpu"], 33_555_456
    assert workspace_bytes(_config(), dense, h100) == workspace_bytes(_config("model.attention=te"), dense, h100) == one
    assert workspace_bytes(_config(), mixture, h100) == 5 * one
    assert workspace_bytes(_config(), mixture, cpu) == workspace_bytes(_config("model.attention=sdpa"), mixture, h100) == 0
    assert workspace_bytes(_config("model.dtype=float32"), dense, h100) == 0
    models: dict[Role, RankModel] = {"policy": replace(_model(1), workspace=5 * one), "critic": replace(_model(1), workspace=one)}
    config = _config()
    held = rank_memory(config, models, vllm_memory(config, mixture, h100), workload(config, None), h100)
    assert {memory.parts["matrix product workspaces"] for memory in held.values()} == {5 * one}


def test_stages_hold_what_the_residency_table_says() -> None:
    config, device = _config("model.offload=true"), DEVICES["h100"]
    arch = find_architecture("qwen2.5-32b")
    vllm, work = vllm_memory(config, arch, device), workload(config, None)
    held = rank_memory(config, {"policy": _model(100), "critic": _model(10_000)}, vllm, work, device)
    for stage in STAGES:
        for role in ("policy", "critic"):
            names = {"params": f"{role} weights", "grads": f"{role} gradients", "optimizer": f"{role} optimizer"}
            assert {part for part, name in names.items() if name in held[stage].parts} == RESIDENCY[stage].get(role, frozenset())
    assert held["policy_update"].parts["policy optimizer"] == 300
    assert held["critic_update"].parts["critic gradients"] == 20_000
    # one more micro-batch in flight on the first of two stages; slack on all but the logits
    assert held["critic_update"].parts["activations"] == pytest.approx((7 + 11 - 2) * 1.05)
    assert held["values"].parts["activations"] == pytest.approx((5 - 2) * 1.05)
    assert "KV cache" in held["generate"].parts and "KV cache" not in held["sync"].parts
    everything = rank_memory(_config("model.offload=false"), {"policy": _model(100)}, vllm, work, device)
    assert all(everything[stage].parts["policy optimizer"] == 300 for stage in STAGES)


def test_weights_are_there_twice_while_a_model_is_built() -> None:
    models: dict[Role, RankModel] = {"policy": _model(10**9), "critic": _model(2 * 10**9)}
    config, device = _config("model.offload=true"), DEVICES["h100"]
    residual = build_bytes(config, {}, device)
    assert residual == device.context_bytes + 5 * device.nccl_bytes  # of the world, TP, PP, DP and the rollout's TP
    assert build_bytes(config, models, device) - residual == pytest.approx((2 * 2 + 4) * 10**9)
    assert build_bytes(_config("model.offload=false"), models, device) - residual == pytest.approx((1 + 2 + 3 + 2 * 2 + 4) * 10**9)


def test_the_weights_of_two_critics_are_there_when_the_second_is_built() -> None:
    """Value pretraining with its own rate or a frozen trunk ends with a new critic, which copies the weights of the old one."""
    models: dict[Role, RankModel] = {"policy": _model(10**9), "critic": _model(2 * 10**9)}
    device = DEVICES["h100"]
    for setting, copies in (("lr=1e-5", 3), ("head_only=true", 3), ("lr=null", 2)):
        config = _config("model.offload=true", f"critic.value_pretraining.{setting}")
        assert build_bytes(config, models, device) - build_bytes(config, {}, device) == pytest.approx((copies * 2 + 4) * 10**9)


def test_a_frozen_trunk_by_hand() -> None:
    """Value pretraining alone, of the head: the trunk's weights, no gradients, no optimizer state and no activations of it, and one copy
    of its weights while the model is built; the same from the configuration as from the model."""
    arch = replace(find_architecture("qwen2.5-0.5b"), num_layers=4)
    layout = ["parallel.world_size=2", "parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2"]
    small = [*layout, "rollout.tensor_parallel_size=1", "critic.head=linear"]
    config = _config(*small, "run.steps=0", "critic.value_pretraining.head_only=true")
    trunk, head = num_parameters(arch, "critic") - 896 - 1, 128 * -(-(896 + 64) // 128)
    planned = []
    for stage in range(2):
        with pipeline_rank(config.parallel, stage) as parallel:
            (built,) = build_state(config, "critic", arch, parallel, on_gpu=True).by_data_rank
        assert built == configured_state(config, arch, "critic", stage=stage, overlap=True)[0]
        planned.append(built)
    assert [state.grads for state in planned] == [0, 4 * head]
    assert [state.optimizer for state in planned] == [0, 8 * (896 + 1)]
    assert sum(state.frozen for state in planned) == 2 * trunk
    assert sum(state.params for state in planned) == 2 * trunk + 4 * head
    models: dict[Role, RankModel] = {"critic": RankModel(planned[1], ())}
    device = DEVICES["h100"]
    assert build_bytes(config, models, device) - build_bytes(config, {}, device) == planned[1].frozen + 3 * 4 * head
    probe = ActivationProbe()
    saved: dict[int, int] = {}
    for steps in (0, 1):
        trained = _config(*small, f"run.steps={steps}", "critic.value_pretraining.head_only=true")
        saved[steps] = probe.chunk(trained, "critic", arch, [512], first=True, last=False, layers=2, on_gpu=True).saved
    assert saved[0] < 2 * 512 * 896 * 2 < saved[1] / 10
    assert snapshot_bytes(arch, "critic", "bfloat16", config.parallel, stage=0, overlap=True, head_only=True) == [planned[0].frozen]
    whole = configured_state(_config(*small, "critic.value_pretraining.head_only=true"), arch, "critic", stage=1, overlap=True)[0]
    assert (whole.frozen, whole.params) == (0, pytest.approx(planned[1].params, rel=1e-3))


@pytest.mark.parametrize(
    ("world", "tp", "pp", "ep", "expert_tp"), [(8, 1, 1, 4, None), (8, 2, 1, 2, None), (4, 2, 1, 4, 1), (4, 2, 2, 1, None)]
)
def test_state_of_a_mixture_is_that_of_megatrons_buffers(world: int, tp: int, pp: int, ep: int, expert_tp: int | None) -> None:
    arch = replace(find_architecture("qwen3-30b-a3b"), num_layers=2, num_experts=8, vocab_size=1000)
    degrees = f"tensor_model_parallel_size: {tp}, pipeline_model_parallel_size: {pp}, expert_model_parallel_size: {ep}"
    expert_degree = "" if expert_tp is None else f", expert_tensor_parallel_size: {expert_tp}"
    config = _config(f"parallel={{world_size: {world}, {degrees}{expert_degree}}}")
    for stage in range(config.parallel.pipeline_model_parallel_size):
        with pipeline_rank(config.parallel, stage) as parallel:
            roles: tuple[Role, ...] = ("policy", "critic")
            for role in roles:
                built = build_state(config, role, arch, parallel, on_gpu=True).by_data_rank
                assert list(built) == configured_state(config, arch, role, stage=stage, overlap=True)


def test_memory_of_router_replay_by_hand() -> None:
    """48 layers, 8 of 128 experts: 384 bytes a token on the host; on the device those of the pass's own part, or of a mini-batch."""
    arch, device = find_architecture("qwen3-30b-a3b"), DEVICES["h100"]
    layout = "parallel={world_size: 16, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, context_parallel_size: 2}"
    config = _config(layout, "model.router.replay=trainer")
    work = workload(config, 4000)
    tokens = 8192 * (1024 + 4000) / 2
    assert choice_bytes_a_token(config, arch) == 48 // 2 * 8
    assert choice_bytes_a_token(_config(layout), arch) == choice_bytes_a_token(config, find_architecture("qwen2.5-32b")) == 0
    assert choices_host_bytes(config, [arch, arch], work, 8) == 8 * tokens * 192 * 2
    penalised = _config(layout, "model.router.replay=trainer", "algorithm.kl={place: reward, coef: 0.1}")
    assert choices_host_bytes(penalised, [arch, arch], work, 8) == 8 * tokens * 192 * 3
    models: dict[Role, RankModel] = {"policy": replace(_model(10**9), choice_bytes_a_token=192)}
    stages = rank_memory(config, models, vllm_memory(config, arch, device), work, device)
    found = {stage: memory.parts["expert choices"] for stage, memory in stages.items() if "expert choices" in memory.parts}
    assert found == {"logprobs": tokens * 192 / 4, "policy_update": tokens * 192 / 16}
    # The engine's: all layers' where they were sampled, 8 of 16 ranks a node, and this rank's layers until the pass that repeats them.
    config = _config(layout, "model.router.replay=engine")
    assert choices_host_bytes(config, [arch, arch], work, 8) == 8 * tokens * 192 * 3 + 2 * tokens * 384 * 8 / 16
    stages = rank_memory(config, models, vllm_memory(config, arch, device), work, device)
    assert stages["logprobs"].parts["expert choices"] == tokens * 192 * (1 + 1 / 4)
    assert stages["policy_update"].parts["expert choices"] == tokens * 192 / 16


def test_time_follows_the_work() -> None:
    arch, device = find_architecture("qwen2.5-32b"), DEVICES["h100"]

    def seconds(*overrides: str) -> dict[str, float]:
        config = _config(*overrides)
        work = workload(config, 4000)
        models = {"policy": _model(10**9), "critic": _model(10**9)}
        return StepTimer(config, arch, arch, work, device).estimate(models, vllm_memory(config, arch, device), 8).phases

    base = seconds()
    tokens = 8192 * (1024 + 4000)
    least = 6 * (num_parameters(arch) - 152064 * 5120) * tokens / 128 / (989e12 * 0.45)
    alone = ["model.recompute=none", "parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=1"]
    assert least < seconds(*alone)["policy_update"] < 1.3 * least  # attention and the reduction of gradients on top
    assert base["policy_update"] > 1.3 * least  # exchanges of tensor parallelism and the pipeline
    assert seconds("policy.epochs=2")["policy_update"] == pytest.approx(2 * base["policy_update"])
    selective, full = (seconds(f"model.recompute={kind}")["policy_update"] for kind in ("selective", "full"))
    assert 1.15 * base["policy_update"] < selective < full < 1.45 * base["policy_update"]
    assert "logprobs" not in seconds("rollout.old_logprobs=rollout")
    assert seconds("algorithm.kl={place: loss, coef: 0.1}")["logprobs"] == pytest.approx(2 * base["logprobs"])
    # the longest response alone takes so many steps, each of which reads this rank's weights
    assert base["generate"] > 20480 * 2 * 32.76e9 / 4 / 3.35e12
    assert "offload" not in seconds("model.offload=false")


def test_time_of_an_optimizer_on_the_cpu_by_hand() -> None:
    """In each of 16 updates gradients leave and weights come back, and AdamW moves 28 bytes an element; nothing else of it is offloaded."""
    arch, device, config = find_architecture("qwen2.5-32b"), DEVICES["h100"], _config()
    timer, vllm = StepTimer(config, arch, arch, workload(config, 4000), device), vllm_memory(config, arch, device)
    chunks = _model(1).chunks
    plain, on_cpu = (
        timer.estimate({"policy": RankModel(state, chunks)}, vllm, 8)
        for state in (StateBytes(2 * 10**9, 4 * 10**9, 12 * 10**9), StateBytes(2 * 10**9, 4 * 10**9, 0, 16 * 10**9))
    )
    more = on_cpu.phases["policy_update"] - plain.phases["policy_update"]
    assert more == pytest.approx(16 * 10**9 * ((4 + 2) / 44e9 + 28 / 20e9))
    assert plain.phases["offload"] - on_cpu.phases["offload"] == pytest.approx(2 * 12e9 / 44e9)
    assert on_cpu.communication.host - plain.communication.host == pytest.approx(16 * 6e9 - 24e9)


def test_optimizers_on_the_cpu_are_among_the_changes_that_are_tried() -> None:
    def tried(*overrides: str) -> list[list[str]]:
        subject = Subject(_config(*overrides), find_architecture("qwen2.5-32b"), find_architecture("qwen2.5-32b"))
        return [
            settings
            for settings in candidate_changes(subject, Cluster.of(128, 8, DEVICES["h100"]))
            if any("cpu_offload" in setting for setting in settings)
        ]

    policy, critic = (f"{role}.optimizer.cpu_offload=true" for role in ("policy", "critic"))
    assert tried() == [[policy, critic]]
    assert tried(critic) == [[policy]]
    assert tried(policy, critic) == []


def test_another_device_is_tried_with_the_numbers_that_were_given() -> None:
    """What is proposed must fit when it is planned again with the same ``--rate`` arguments."""
    rates = ["memory=6e10", "node_memory=1e12"]
    subject = Subject(_config(), find_architecture("qwen2.5-32b"), None)
    tried: list[Device] = []

    class Recorder(Planner):
        def plan(self, subject: Subject, cluster: Cluster, *, build: bool) -> Plan:
            tried.append(cluster.device)
            return plan

    plan = SimpleNamespace(subject=subject, cluster=Cluster.of(128, 8, choose_device("h100", rates)), fits=False)

    def reload(settings: list[str]) -> Subject:
        raise ConfigError("not of interest here")

    assert list(single_changes(plan, Recorder(), reload, rates)) == []
    assert tried == [choose_device("h200", rates)]
    assert (tried[0].name, tried[0].memory, tried[0].memory_rate) == ("h200", 6e10, DEVICES["h200"].memory_rate)
