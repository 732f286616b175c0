"""What vLLM is started with on a GPU, against the installed vLLM's sources: arguments it knows, memory it must have released."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vapo_mcore.config.schema import VllmConfig
from vapo_mcore.errors import EXIT_REQUEUE, EngineRemains
from vapo_mcore.rollout import vllm_engine, vllm_experts
from vapo_mcore.rollout.base import Replica


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_HAS_CUDA", True)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arguments(**settings: Any) -> dict[str, Any]:
    replica = Replica.of_rank(0, 1, 1)
    return vllm_engine._engine_arguments("model", torch.bfloat16, VllmConfig(**settings), replica, max_model_len=64, seed=1)


def source(module: str) -> str:
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    return (Path(package.origin).parent / f"{module}.py").read_text(encoding="utf-8")


def fields_of(module: str, name: str) -> set[str]:
    (found,) = [node for node in ast.parse(source(module)).body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def test_decoding_is_eager_on_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = {given: arguments(enforce_eager=given)["enforce_eager"] for given in (None, True, False)}
    assert eager == {None: True, True: True, False: False}
    monkeypatch.setattr(vllm_engine, "_HAS_CUDA", True)
    graphs = {given: arguments(enforce_eager=given) for given in (None, True, False)}
    assert {given: found["enforce_eager"] for given, found in graphs.items()} == {None: False, True: True, False: False}
    # the memory of CUDA graphs leaves the device with the rest; vLLM refuses nothing without graphs, but has nothing to move
    assert {given: found["sleep_mode_offload_cudagraph"] for given, found in graphs.items()} == {None: True, True: False, False: True}


def test_vllm_knows_every_argument(gpu: None) -> None:
    assert set(arguments()) | set(vllm_experts.ARGUMENTS) <= fields_of("engine/arg_utils", "EngineArgs")


def test_vllm_returns_experts_as_on_the_gpu_path() -> None:
    """What ``vllm_experts`` relies on: who records, who is asked for it, and where it comes back."""
    settings = source("config/vllm")
    assert "AuxOutput Connector requires Model Runner V2" in settings
    assert "AuxOutput Connector requires prefix caching" in settings
    worker = source("distributed/aux_output_connector/worker")
    assert "if not get_tp_group().is_first_rank:\n            return" in worker  # the other ranks of a replica have no choices
    scheduler = source("v1/core/sched/scheduler")
    assert "routed_experts = self.aux_output_connector.take_output(" in scheduler
    assert "self.aux_output_connector.request_finished(request)" in scheduler
    assert "routed_experts" in fields_of("outputs", "CompletionOutput")
    assert "self.capture_fn(topk_ids)" in source("model_executor/layers/fused_moe/router/base_router")
    assert "aux_output" not in source("v1/worker/gpu_model_runner")  # the first version, which the CPU backend runs


def test_vllm_copies_graph_inputs_where_their_pool_is_offloaded() -> None:
    """What makes ``expandable_segments`` safe with tensor parallelism: inputs of the custom all-reduce are copied."""
    text = source("distributed/device_communicators/cuda_communicator")
    assert "register = config is None or not config.use_cumem_cudagraph_pool" in text
    assert text.count("register_graph_buffers=register") >= 1
    assert "set_alloc_conf(with_conf_flag(prev_conf, EXPANDABLE_SEGMENTS, False))" in source("device_allocator/cumem")


@pytest.mark.parametrize(("cuda", "value"), [(True, "1"), (False, "0")])
def test_the_model_runner_is_pinned(cuda: bool, value: str, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_HAS_CUDA", cuda)
    monkeypatch.setattr(os, "environ", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "VLLM_USE_V2_MODEL_RUNNER": "?"})
    vllm_engine._prepare_environment(0)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == value
    assert '"VLLM_USE_V2_MODEL_RUNNER": lambda' in source("envs")


def test_an_engine_that_keeps_memory_asks_for_a_new_process(gpu: None, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own allocator, with what its callback notes when memory is allocated."""
    from vllm.device_allocator.cumem import CuMemAllocator

    monkeypatch.setattr(CuMemAllocator, "instance", None)
    vllm_engine._require_released()
    allocator = CuMemAllocator()
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    vllm_engine._require_released()
    allocator._python_malloc_callback((0, 3 * 2**30, 0x7000, 0))
    with pytest.raises(EngineRemains, match=r"still holds device memory \(rank 0: 3.0 GiB\)") as caught:
        vllm_engine._require_released()
    assert caught.value.exit_code == EXIT_REQUEUE
    # the assertion that a new engine would run into
    assert "assert allocator.get_current_usage() == 0" in source("v1/worker/gpu_worker")
