"""Models of Transformer Engine's layers, executed without a GPU: right answers in every layout, offload, recomputation, checkpoints.

Needs the environment of `make setup-gpu`, and fails without it; `make test-gpu-stack` makes it and runs this. No other target runs it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layouts import limit
from tests.torchrun import run_torchrun

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "distributed" / "layouts"))
import problem  # noqa: E402

MODELS = ("qwen2", "qwen2_tied", "qwen3", "llama_tied", "one_kv_head", "qwen3_moe", "qwen3_moe_raw")


def cases_of(output: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line.pop("case", "end"): line for line in lines}


def run_layouts(world: int, workdir: Path, *names: str) -> dict[str, Any]:
    result = run_torchrun(HERE / "layouts_worker.py", world, str(workdir), *names, timeout=3600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return cases_of(result.stdout)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("te")
    for model in MODELS:
        problem.make_model(model, folder / model)
    return folder


@pytest.fixture(scope="module")
def one_process(workdir: Path) -> dict[str, Any]:
    """Also writes the reference files that several processes are compared with."""
    return run_layouts(1, workdir)


def check(found: dict[str, Any], cases: int, called: set[str], *, tolerated: str | None = None) -> None:
    end = found.pop("end")
    print(json.dumps({"cases": found, **end}, indent=1))  # for docs/gpu_status.md
    assert [fault for fault in end["faults"] if tolerated is None or tolerated not in fault] == [] and called <= end["calls"].keys()
    assert len(found) == cases, sorted(found)
    wrong = {(case, name): error for case, errors in found.items() for name, error in errors.items() if not error <= limit(case, name)}
    assert not wrong, wrong


LAYERS = {"rmsnorm_fwd", "rmsnorm_bwd", "generic_gemm", "fused_rope_forward", "fused_rope_backward"}
OPTIMIZER = {"multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"}
FUSED = {"get_fused_attn_backend", "fused_attn_fwd", "fused_attn_bwd"}
EXPERTS = {"te_general_grouped_gemm"}
UNFUSED = {"convert_thd_to_bshd", "convert_bshd_to_thd"}
RING = "given back while another stream may still use it (no record_stream) @ extensions/transformer_engine.py:1411"
"""Transformer Engine's ring exchange frees memory of its second stream while the first may read it. No fault: the second stream's next work
follows an exchange that the first one has begun after its reads."""
SHAPE_LAYERS = 4
"""Of the models of ``tests/fake_cuda/models.py``."""


def test_one_process_equals_float64(one_process: dict[str, Any]) -> None:
    """Float32 within 1e-5 by the unfused attention, bfloat16 by the fused one; recomputation; five kinds of models; grouped experts."""
    check(one_process, 13, LAYERS | OPTIMIZER | FUSED | UNFUSED | EXPERTS)


def test_two_processes_equal_one(workdir: Path, one_process: dict[str, Any]) -> None:
    """TP with and without sequence parallelism, PP, DP, EP of grouped experts, and CP by the ring exchange."""
    del one_process
    called = LAYERS | OPTIMIZER | FUSED | UNFUSED | EXPERTS | {"thd_read_half_tensor", "thd_out_correction"}
    check(run_layouts(2, workdir), 19, called, tolerated=RING)


def test_four_processes_equal_one(workdir: Path, one_process: dict[str, Any]) -> None:
    """Grouped experts at EP 2 with TP 2 (every expert on two ranks) and with PP 2."""
    del one_process
    check(run_layouts(4, workdir), 2, LAYERS | OPTIMIZER | UNFUSED | EXPERTS)


def test_tf32_is_why_auto_avoids_it(workdir: Path, one_process: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs with float32 operands rounded as cuBLAS rounds them: many times float32's error, a fraction of bfloat16's."""
    monkeypatch.setitem(os.environ, "TF32", "1")
    case = "qwen2-tp1-pp1-cp1-dp1-te-mb3-token"
    rounded = run_layouts(1, workdir, case)[case]
    exact, bfloat16 = one_process[case], one_process[case.replace("te-", "bfloat16-te-")]
    assert 30 * exact["logprobs"] < rounded["logprobs"] < bfloat16["logprobs"] / 5


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("states") / "states.json"
    result = run_torchrun(HERE / "states_worker.py", 1, "fake", str(file), timeout=3600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["faults"] == []
    return found


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_offload(states: dict[str, Any], dtype: str, bound: float) -> None:
    """Steps with offload have the numbers of Megatron's own layers; of either model only caches stay on the device."""
    te, local = (states[f"offload {dtype} {attention}"] for attention in ("te", "sdpa"))
    assert te["numbers"].keys() == local["numbers"].keys()
    for name, values in local["numbers"].items():
        texts = [isinstance(value, str) for value in values]
        for got, right, is_text in zip(te["numbers"][name], values, texts, strict=True):
            assert got == (right if is_text else pytest.approx(right, rel=bound, abs=bound)), name
    assert te["residency"] == 0
    # the matrix products' workspace, which all layers share and Transformer Engine never frees (the first case of the process allocates it)
    assert states["workspace"] in te["live"].values()
    left = max(te["left"])
    assert 0 <= (left if left < states["workspace"] else left - states["workspace"]) < 200_000, te["live"]  # rotary tables


def test_a_pass_waits_for_nothing(states: dict[str, Any]) -> None:
    """In bfloat16, as Megatron's own layers; in float32 Transformer Engine waits for the number of tokens in every layer."""
    te = states["offload bfloat16 te"]["syncs"]
    assert te["policy forward"] == [{}, {}]
    few, many = (sum(found.values()) for found in te["policy step"])
    assert few == many <= 10


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_both_kinds_of_layers(states: dict[str, Any], role: str, dtype: str) -> None:
    """Weights are the same bits whoever wrote them, and training goes on alike, but for buffers stored as they are in memory."""
    bound = 1e-5 if dtype == "float32" else 2e-2
    for name, case in states[f"checkpoint {role} {dtype}"].items():
        writer, reader, form = name.split("-")
        assert case["different"] == [] and case["keys"] > 40, name
        assert case["extra_states"] == 4 * SHAPE_LAYERS + (writer == "te"), name  # linear layers of either kind, and the last norm
        follow, resumed = case["norms"]
        alike = resumed == pytest.approx(follow, rel=bound)
        assert (writer == reader) == (case["layers"][0] == case["layers"][1])
        # what vapo_mcore.checkpoint.resume refuses: the layers' parameters have another order, and Megatron does not notice
        assert alike == (writer == reader or form == "fully_reshardable"), (name, follow, resumed)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_checkpoints_of_grouped_experts(states: dict[str, Any], role: str) -> None:
    """What grouped experts write, experts that run one after another read, and the other way round."""
    for name, case in states[f"checkpoint mixture {role} float32"].items():
        writer, reader, form = name.split("-")
        assert case["layers"] == [{"te": "te_grouped", "sdpa": "local"}[kind] for kind in (writer, reader)]
        assert case["different"] == [] and case["keys"] > 80, name
        follow, resumed = case["norms"]
        alike = resumed == pytest.approx(follow, rel=1e-5)
        assert alike == (writer == reader or form == "fully_reshardable"), (name, follow, resumed)
