"""Scenario 18: what each state allows; names that differ are an error that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rollout_models import in_buckets, load_model, named_weights
from vapo_mcore.errors import EngineFailure, RolloutError
from vapo_mcore.rollout.base import EngineState, GenerationRequest, Replica, SamplingConfig
from vapo_mcore.rollout.transformers_engine import TransformersEngine
from vapo_mcore.weights.checksums import tensor_checksum

REQUEST = GenerationRequest("p", 0, [5, 6], seed=1)
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4)
MakeEngine = Callable[..., TransformersEngine]
GetFolder = Callable[[str], Path]


@pytest.fixture
def weights(folder: GetFolder) -> dict[str, Tensor]:
    return named_weights(load_model(folder("qwen2")))


def reach(engine: TransformersEngine, state: EngineState, weights: dict[str, Tensor]) -> None:
    if state is EngineState.ASLEEP:
        return
    engine.wake_weights()
    if state is EngineState.BROKEN:
        with pytest.raises(ZeroDivisionError):
            engine.update_weights(interrupted(weights), list(weights))
        return
    if state is not EngineState.WEIGHTS_AWAKE:
        engine.update_weights(in_buckets(weights), list(weights))
    if state is EngineState.READY:
        engine.wake_kv_cache()


def interrupted(weights: dict[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    yield list(weights.items())[:5]
    raise ZeroDivisionError


CALLS: dict[str, Callable[[TransformersEngine, dict[str, Tensor]], object]] = {
    "generate": lambda engine, _: engine.generate([REQUEST], SAMPLING),
    "update_weights": lambda engine, weights: engine.update_weights(in_buckets(weights), list(weights)),
    "sleep": lambda engine, _: engine.sleep(),
    "wake_weights": lambda engine, _: engine.wake_weights(),
    "wake_kv_cache": lambda engine, _: engine.wake_kv_cache(),
    "rebuild": lambda engine, _: engine.rebuild(),
    "holds": lambda engine, weights: engine.holds(*next(iter(weights.items()))),
}
ALLOWED = {
    EngineState.ASLEEP: {"wake_weights": EngineState.WEIGHTS_AWAKE},
    EngineState.WEIGHTS_AWAKE: {"update_weights": EngineState.WEIGHTS_LOADED, "sleep": EngineState.ASLEEP},
    EngineState.WEIGHTS_LOADED: {
        "wake_kv_cache": EngineState.READY,
        "sleep": EngineState.ASLEEP,
        "holds": EngineState.WEIGHTS_LOADED,
    },
    EngineState.READY: {"generate": EngineState.READY, "sleep": EngineState.ASLEEP, "holds": EngineState.READY},
    EngineState.BROKEN: {},
}


@pytest.mark.parametrize("state", EngineState)
def test_every_call_in_every_state(state: EngineState, folder: GetFolder, make_engine: MakeEngine, weights: dict[str, Tensor]) -> None:
    for name, call in CALLS.items():
        engine = make_engine(folder("qwen2"))
        reach(engine, state, weights)
        assert engine.state is state
        if name in ALLOWED[state] or name == "rebuild":
            call(engine, weights)
            assert engine.state is ALLOWED[state].get(name, EngineState.ASLEEP)
        else:
            with pytest.raises(RolloutError, match=rf"{name} needs state .* but the engine is {state.name}"):
                call(engine, weights)
            assert engine.state is state


def test_a_generation_that_fails_breaks_the_engine_until_it_is_rebuilt(
    folder: GetFolder, make_engine: MakeEngine, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder("qwen2"))
    reach(engine, EngineState.READY, weights)
    expected = engine.generate([REQUEST], SAMPLING)

    def fails(*_: object) -> object:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_generate_batch", fails)
        with pytest.raises(EngineFailure, match="MemoryError: no memory left"):
            engine.generate([REQUEST], SAMPLING)
    assert engine.state is EngineState.BROKEN
    engine.rebuild()
    reach(engine, EngineState.READY, weights)
    assert engine.generate([REQUEST], SAMPLING) == expected


def test_requests_that_cannot_be_met_do_not_break_the_engine(
    folder: GetFolder, make_engine: MakeEngine, weights: dict[str, Tensor]
) -> None:
    engine = make_engine(folder("qwen2"))
    reach(engine, EngineState.READY, weights)
    with pytest.raises(RolloutError, match="empty prompt"):
        engine.generate([GenerationRequest("p", 0, [], seed=1)], SAMPLING)
    assert engine.state is EngineState.READY


def test_announced_names_must_be_the_models(folder: GetFolder, make_engine: MakeEngine, weights: dict[str, Tensor]) -> None:
    engine = make_engine(folder("qwen2"))
    engine.wake_weights()
    names = [name for name in weights if not name.endswith("norm.weight")] + ["lm_head.bias"]

    def never() -> Iterator[list[tuple[str, Tensor]]]:
        raise AssertionError("the buckets were touched")
        yield

    with pytest.raises(RolloutError, match=r"missing \(5\): model.layers.0.input_layernorm.weight.*; not in the model \(1\): lm_head.bias"):
        engine.update_weights(never(), names)
    assert engine.state is EngineState.WEIGHTS_AWAKE


def test_delivered_tensors_must_be_the_models(folder: GetFolder, make_engine: MakeEngine, weights: dict[str, Tensor]) -> None:
    engine = make_engine(folder("qwen2"))
    engine.wake_weights()
    wrong = dict(weights)
    del wrong["model.norm.weight"]
    wrong["lm_head.bias"] = torch.zeros(3)
    wrong["model.layers.1.mlp.up_proj.weight"] = torch.zeros(200, 128)  # a narrowing loader would quietly take a part of it
    read = 0

    def buckets() -> Iterator[list[tuple[str, Tensor]]]:
        nonlocal read
        for bucket in [*in_buckets(wrong), [("lm_head.weight", weights["lm_head.weight"])]]:
            read += 1
            yield bucket

    with pytest.raises(RolloutError) as caught:
        engine.update_weights(buckets(), list(weights))
    assert read == 8  # to the end, for the other ranks' sake
    for part in (
        "missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "not in the model (1): lm_head.bias",
        "delivered twice (1): lm_head.weight",
        "wrong shape (1): model.layers.1.mlp.up_proj.weight (200, 128) instead of (192, 128)",
    ):
        assert part in str(caught.value)
    assert engine.state is EngineState.WEIGHTS_AWAKE
    engine.update_weights(in_buckets(weights), list(weights))  # a right sync is accepted afterwards
    assert engine.state is EngineState.WEIGHTS_LOADED


def test_report_and_checksums(folder: GetFolder, make_engine: MakeEngine, weights: dict[str, Tensor]) -> None:
    engine = make_engine(folder("qwen2"))
    engine.wake_weights()
    assert engine.last_sync is None
    report = engine.update_weights(in_buckets(weights), list(weights), checksum=tensor_checksum)
    assert report is engine.last_sync
    assert (report.names, report.bytes) == (len(weights), sum(tensor.numel() * 4 for tensor in weights.values()))
    assert 0 < report.load_seconds < report.seconds
    assert report.checksums == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    engine.sleep()
    engine.wake_weights()
    assert engine.update_weights(in_buckets(weights), list(weights)).checksums is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "'bad': empty prompt"),
        ([5] * 125, r"'bad': 125 prompt tokens \+ max_tokens = 4 exceed the engine's 128"),
        ([5, 131], "'bad': a token id outside the model's vocabulary of 131"),
        ([-1], "'bad': a token id outside"),
    ],
)
def test_requests_that_cannot_be_generated(prompt: list[int], message: str, folder: GetFolder, ready_engine: Callable) -> None:
    engine, _ = ready_engine(folder("qwen2"))
    requests = [REQUEST, GenerationRequest("bad", 0, prompt, seed=1)]
    with pytest.raises(RolloutError, match="1 of 2 requests cannot be generated: " + message):
        engine.generate(requests, SAMPLING)
    assert engine.generate([], SAMPLING) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.005}, "temperature = 0.005: use 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 2.5}, "temperature = 2.5: use 0 .greedy. or 0.01 to 2.0"),
        ({"top_p": 0.0, "top_k": 0, "max_tokens": 0}, "top_p = 0.0.*; top_k = 0.*; max_tokens = 0"),
    ],
)
def test_sampling_settings(change: dict[str, float], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        SamplingConfig(**({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4} | change))  # type: ignore[arg-type]


def test_replicas_are_contiguous_ranks() -> None:
    replicas = [Replica.of_rank(rank, 6, 2) for rank in range(6)]
    assert [(r.index, r.rank_in_replica) for r in replicas] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {r.count for r in replicas} == {3}
    with pytest.raises(RolloutError, match="4 must divide the world size 6"):
        Replica.of_rank(0, 6, 4)
