"""Which attention and which recomputation a machine with CUDA gets; float32 never by way of TF32 unless Transformer Engine is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollout_models import write_model
from vapo_mcore.certify.checks import trainer
from vapo_mcore.config.schema import ModelConfig
from vapo_mcore.errors import ConfigError
from vapo_mcore.megatron import model as module
from vapo_mcore.megatron.model import Attention, _expert_settings, choose_attention, layer_kind, recompute_settings
from vapo_mcore.trainer import models
from vapo_mcore.weights import verify
from vapo_mcore.weights.views import open_view


class Built(Exception):
    """Carries the settings that a model would have been built with."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def pretend(has_te: bool) -> None:
        monkeypatch.setattr(module, "HAS_CUDA", True)
        monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace() if has_te else None)

    return pretend


@pytest.mark.parametrize(
    ("has_te", "cp", "dtype", "chosen"),
    [
        (True, 1, "bfloat16", "te"),
        (True, 2, "bfloat16", "te"),
        (False, 1, "bfloat16", "varlen"),
        (False, 2, "bfloat16", "sdpa"),
        (True, 1, "float32", "sdpa"),
        (False, 1, "float32", "sdpa"),
    ],
)
def test_auto_on_a_gpu(gpu: Callable[[bool], None], has_te: bool, cp: int, dtype: str, chosen: str) -> None:
    gpu(has_te)
    assert choose_attention("auto", cp, dtype) == chosen


@pytest.mark.parametrize(("dtype", "attention", "warned"), [("float32", "te", True), ("float32", "auto", False), ("bfloat16", "te", False)])
def test_a_run_is_told_of_tf32(dtype: Any, attention: Any, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before models are built."""

    def stop(_: str) -> None:
        raise Built

    monkeypatch.setattr(models, "read_architecture", lambda _: SimpleNamespace(vocab_size=8))
    monkeypatch.setattr(models, "load_tokenizer", stop)
    config: Any = SimpleNamespace(model=ModelConfig(path="a folder", dtype=dtype, attention=attention))
    said: list[str] = []
    parallel: Any = SimpleNamespace(device=None)
    with pytest.raises(Built):
        models.build_models(config, parallel, said.append)
    assert [line for line in said if "multiplies float32 in TF32" in line] == said and bool(said) == warned


def test_te_is_taken_for_float32_where_it_is_asked_for(gpu: Callable[[bool], None]) -> None:
    gpu(True)
    assert choose_attention("te", 1, "float32") == "te"


def test_te_in_float32_is_refused_with_context_parallelism(gpu: Callable[[bool], None]) -> None:
    """Transformer Engine has no attention for it; it would raise in the first forward pass."""
    gpu(True)
    with pytest.raises(ConfigError, match=r"float32 does not support context parallelism: .*; use auto or sdpa, or model.dtype = bfloat16"):
        choose_attention("te", 2, "float32")


def test_layers_of_an_attention() -> None:
    assert {attention: layer_kind(attention) for attention in ("te", "varlen", "sdpa")} == {"te": "te", "varlen": "local", "sdpa": "local"}  # type: ignore[arg-type]


def test_experts_are_computed_together_by_transformer_engine_alone() -> None:
    """Their parameters then have an order of their own; the log says which way they are computed."""
    layouts: Any = SimpleNamespace(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    shape: Any = SimpleNamespace(is_moe=True, num_experts=8, num_experts_per_token=2, moe_ffn_hidden_size=32, norm_topk_prob=True)
    kinds: tuple[Attention, ...] = ("te", "varlen", "sdpa")
    grouped = [_expert_settings(shape, layouts, attention)["moe_grouped_gemm"] for attention in kinds]
    assert grouped == [True, False, False]
    assert [layer_kind(attention, experts=True) for attention in kinds] == ["te_grouped", "local", "local"]
    said: list[str] = []
    for together in (True, False):
        model: Any = SimpleNamespace(role="critic", architecture=shape, parallel=layouts, config=SimpleNamespace(moe_grouped_gemm=together))
        models._report_experts(model, said.append)
    assert (
        said[0] == "critic: 8 experts a layer, 4 of them on each rank, computed together, by Transformer Engine's grouped matrix products"
    )
    assert said[1] == (
        "critic: 8 experts a layer, 4 of them on each rank, computed one after another (model.attention = te, on GPUs, has grouped "
        "matrix products)"
    )
    models._report_experts(SimpleNamespace(architecture=SimpleNamespace(num_experts=None)), said.append)  # type: ignore[arg-type]
    assert len(said) == 2


def test_selective_recomputes_attention_only_where_it_keeps_scores() -> None:
    modules = {attention: recompute_settings("selective", attention)["recompute_modules"] for attention in ("te", "varlen", "sdpa")}  # type: ignore[arg-type]
    assert modules == {"te": ["mlp"], "varlen": ["mlp"], "sdpa": ["core_attn", "mlp"]}
    assert recompute_settings("none", "te") == {}


def test_comparisons_with_the_cpu_avoid_tf32(gpu: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify --logits`` and certify's check ``trainer`` (the parity of gpu_step.py) on a machine with Transformer Engine."""
    gpu(True)

    def stop(*arguments: Any, **_: Any) -> None:
        raise Built(next(value for value in arguments if hasattr(value, "attention")))

    def chosen(build: Callable[[], object]) -> str:
        with pytest.raises(Built) as caught:
            build()
        settings = caught.value.args[0]
        return choose_attention(settings.attention, 1, settings.dtype)

    parallel: Any = SimpleNamespace(device=None)
    model = ModelConfig(path="a folder", dtype="bfloat16", attention="te")
    bench: Any = SimpleNamespace(config=SimpleNamespace(model=model), architecture=None, parallel=parallel, unknown_token_ids=())
    monkeypatch.setattr(trainer, "MegatronModel", stop)
    assert chosen(lambda: trainer._in_float32(bench)) == "sdpa"

    monkeypatch.setattr("vapo_mcore.megatron.model.build_chunks", stop)
    monkeypatch.setattr("vapo_mcore.megatron.parallel.initialize_parallel", lambda _: parallel)
    with open_view(write_model("qwen2", tmp_path / "model")) as view:
        assert chosen(lambda: verify._megatron_outputs(view, [[1, 2]])) == "sdpa"
