"""Model state from the configuration alone: published parameter counts, Megatron's buffer layout by hand, host memory."""

import subprocess
import sys

import pytest

from tests.torchrun import ROOT
from vapo_mcore.config import Config, load_config
from vapo_mcore.config.architecture import new_critic
from vapo_mcore.config.schema import ParallelConfig
from vapo_mcore.errors import ConfigError
from vapo_mcore.planning.catalog import find_architecture, known_models
from vapo_mcore.planning.state import Parameter, flat_buffers, model_state, num_active_parameters, num_parameters, offload_host_bytes

PUBLISHED = {  # of the models' safetensors indices
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
}


def test_parameter_counts_are_the_published_ones() -> None:
    assert {name: num_parameters(find_architecture(name)) for name in known_models()} == PUBLISHED


def test_active_parameters_of_a_mixture() -> None:
    assert num_active_parameters(find_architecture("qwen3-30b-a3b")) == pytest.approx(3.04e9, rel=0.01)  # 3.3 B with the embedding
    dense = find_architecture("qwen2.5-32b")
    assert num_active_parameters(dense) == num_parameters(dense) - dense.vocab_size * dense.hidden_size - dense.hidden_size


def test_buffers_by_hand() -> None:
    """Reverse order, starts at multiples of 64, buckets padded to lcm(ranks, 128), and each rank's part of each bucket."""
    parameters = [Parameter("a", 100, 2), Parameter("b", 30, 2), Parameter("head", 5, 4)]
    half, full = flat_buffers(parameters, 2, None)
    assert (half.ranges, half.buckets) == (((0, 30), (64, 164)), ((0, 256),))
    assert half.shard_numels(2) == [30 + 64, 36]
    assert (full.ranges, full.buckets, full.shard_numels(2)) == (((0, 5),), ((0, 128),), [5, 0])
    (split,) = flat_buffers(parameters[:2], 2, 20)  # each parameter fills a bucket
    assert (split.ranges, split.buckets, split.shard_numels(2)) == (((0, 30), (128, 228)), ((0, 128), (128, 256)), [30 + 64, 36])
    shared = [Parameter("embedding", 10, 2, shared_embedding=True), Parameter("w", 70, 2)]
    (own,) = flat_buffers(shared, 3, None)
    assert (own.ranges, own.buckets) == (((0, 70), (384, 394)), ((0, 384), (384, 768)))
    assert own.shard_numels(3) == [70 + 10, 0, 0]


def test_state_of_a_data_parallel_model_adds_up() -> None:
    """Shards of all ranks together hold 12 bytes an element (8 in float32), whatever the padding."""
    arch = find_architecture("qwen2.5-0.5b")
    parallel = ParallelConfig(world_size=6)
    for dtype, item, per_element in (("bfloat16", 2, 12), ("float32", 4, 8)):
        states = model_state(arch, "policy", dtype, parallel, stage=0, overlap=True)
        assert sum(state.optimizer for state in states) == per_element * num_parameters(arch)
        assert 0 <= states[0].params - item * num_parameters(arch) < 0.001 * states[0].params
        assert states[0].grads * item == states[0].params * 4


def _config(*overrides: str) -> Config:
    return load_config(
        ROOT / "examples/configs/quickstart.yaml", ["parallel.world_size=8", "model.dtype=bfloat16", *overrides], check_paths=False
    )


def test_host_bytes_of_offloading() -> None:
    arch = find_architecture("qwen2.5-1.5b")
    count = num_parameters(arch)
    shard = 12 * count / 8
    expected = 2 * (2 * count + shard)  # embeddings are tied, so the critic is as large as the policy, but for its head of hidden + 1
    one = offload_host_bytes(_config(), arch)
    assert one == pytest.approx(expected, rel=0.002)
    assert offload_host_bytes(_config(), arch, processes_per_node=8) == pytest.approx(8 * expected, rel=0.002)
    reference = offload_host_bytes(_config("algorithm.kl={place: loss, coef: 0.1}"), arch)
    assert reference - one == pytest.approx(2 * count, rel=0.001)
    small = offload_host_bytes(_config("algorithm.advantage={estimator: grpo}", "critic=null"), arch)
    assert small == pytest.approx(2 * count + shard, rel=0.002)


def test_an_optimizer_on_the_cpu_is_in_host_memory_whether_models_move_or_not() -> None:
    """16 bytes an element, whatever the type: main parameter, two moments, the gradient's copy; nothing of it on the device."""
    arch = find_architecture("qwen2.5-1.5b")
    count = num_parameters(arch)
    for dtype in ("bfloat16", "float32"):
        plain, on_cpu = (
            model_state(arch, "policy", dtype, ParallelConfig(world_size=6), stage=0, overlap=True, cpu_offload=choice)
            for choice in (False, True)
        )
        assert sum(state.host for state in on_cpu) == 16 * count
        assert [(state.params, state.grads, state.optimizer) for state in on_cpu] == [(state.params, state.grads, 0) for state in plain]
    both, policy = (f"{role}.optimizer.cpu_offload=true" for role in ("critic", "policy"))
    assert offload_host_bytes(_config(policy), arch) == pytest.approx(4 * count + (16 + 12) * count / 8, rel=0.002)
    assert offload_host_bytes(_config(policy, both), arch, models_move=False) == pytest.approx(32 * count / 8, rel=0.002)
    assert offload_host_bytes(_config(), arch, models_move=False) == 0


def test_a_head_of_two_layers_by_hand() -> None:
    """hidden x hidden and hidden elements more, in float32 and on every tensor-parallel rank; in host memory too, path or none."""
    arch = find_architecture("qwen2.5-0.5b")
    config = _config("parallel={world_size: 2, tensor_model_parallel_size: 2}", "critic.head=mlp")
    deep, more = new_critic(config, arch), 896 * 896 + 896
    assert num_parameters(deep, "critic") - num_parameters(arch, "critic") == more
    assert num_parameters(deep) == num_parameters(arch)
    (linear,), (mlp,) = (model_state(one, "critic", "bfloat16", config.parallel, stage=0, overlap=True) for one in (arch, deep))
    assert 0 <= mlp.params - linear.params - 4 * more < 1024
    assert mlp.optimizer - linear.optimizer == 8 * more
    plain, planned = offload_host_bytes(config, arch, arch), offload_host_bytes(config, arch)
    assert planned == offload_host_bytes(config, arch, deep)
    assert planned - plain == pytest.approx(12 * more, abs=1024)
    categorical = new_critic(_config("critic.categorical={low: -0.2, high: 1.2, bins: 51}"), arch)
    assert num_parameters(categorical, "critic") - num_parameters(arch, "critic") == 50 * (896 + 1)


def test_nodes_are_filled_in_the_order_of_ranks() -> None:
    """Two stages of eight ranks: with eight processes a node, each stage is a node."""
    arch = find_architecture("qwen2.5-1.5b")
    config = _config("parallel={world_size: 16, pipeline_model_parallel_size: 2, tensor_model_parallel_size: 2}")
    node = offload_host_bytes(config, arch, processes_per_node=8)
    stages = []
    for stage in range(2):
        models = [model_state(arch, role, "bfloat16", config.parallel, stage=stage, overlap=True) for role in ("policy", "critic")]  # type: ignore[arg-type]
        stages.append(sum(2 * (state.params + state.optimizer) for model in models for state in model))
    assert node == max(stages)


def test_unknown_models_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'qwen2.5-33b' is not a known model, file or folder; did you mean qwen2.5-32b\?"):
        find_architecture("qwen2.5-33b")


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, vapo_mcore.planning.state, vapo_mcore.planning.catalog; print({'torch', 'numpy', 'megatron'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"
