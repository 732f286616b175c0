"""A rollout engine that fails: what is sampled after a rebuild, how often it is rebuilt, and what cannot be repaired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rollout_models import PROMPTS, in_buckets, load_model, named_weights, write_model
from tests.training_setup import write_tokenizer
from tests.unit.trainer.rollouts import make_config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.errors import EXIT_REQUEUE, EngineRemains, RewardError, StepAbandoned
from vapo_mcore.experience.open_responses import OpenResponses
from vapo_mcore.experience.sampling import ResponseSampler, Round
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rewards import VerifierPool
from vapo_mcore.rollout.base import Replica, SamplingConfig
from vapo_mcore.rollout.recovery import EngineRecovery
from vapo_mcore.rollout.transformers_engine import TransformersEngine

SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12)
ASKED = [Prompt(f"p{i}", list(tokens), "?", "7", "s", "exact", {}) for i, tokens in enumerate(PROMPTS[:3])]


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model("qwen2", tmp_path_factory.mktemp("recovery") / "model")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def sampler(folder: Path) -> Iterator[ResponseSampler]:
    from transformers import AutoTokenizer

    engine = TransformersEngine(folder, torch.float32, Replica.of_rank(0, 1, 1), max_model_len=128, device=torch.device("cpu"))
    with VerifierPool(1, 5.0) as pool:
        found = ResponseSampler(engine, pool, AutoTokenizer.from_pretrained(folder, local_files_only=True), run_seed=3)
        make_ready(engine, folder)
        yield found


def make_ready(engine: TransformersEngine, folder: Path) -> None:
    weights = named_weights(load_model(folder))
    engine.wake_weights()
    engine.update_weights(in_buckets(weights), list(weights))
    engine.wake_kv_cache()


def sample(sampler: ResponseSampler) -> Round:
    return sampler.sample(ASKED, 2, SAMPLING, seed_step=1, timer=PhaseTimer())


def fail(sampler: ResponseSampler, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The next generations of the engine fail after they have done their work."""
    original, left = sampler.engine._generate_batch, [times]  # type: ignore[attr-defined]

    def fails(*arguments: Any) -> Any:
        found = original(*arguments)
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("the device is lost")
        return found

    monkeypatch.setattr(sampler.engine, "_generate_batch", fails)


def with_recovery(sampler: ResponseSampler, folder: Path, rebuilds: int) -> ResponseSampler:
    """A sampler of the same engine and graders that rebuilds the engine."""
    recovery = EngineRecovery(sampler.engine, lambda: make_ready(sampler.engine, folder), rebuilds)  # type: ignore[arg-type]
    return ResponseSampler(sampler.engine, sampler.verifiers, sampler.tokenizer, sampler.run_seed, recover_engine=recovery)


def test_after_a_rebuild_the_same_is_sampled(sampler: ResponseSampler, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sample(sampler)
    sampler = with_recovery(sampler, folder, rebuilds=1)
    fail(sampler, monkeypatch, 1)
    found = sample(sampler)
    assert sampler.engine_rebuilds == 1
    assert found.rows.prompt_id == expected.rows.prompt_id
    for name in ("tokens", "rollout_logprobs", "response_mask"):
        assert torch.equal(found.local[name], expected.local[name])
    assert torch.equal(found.rows.score, expected.rows.score)


@pytest.mark.parametrize(("rebuilds", "message"), [(0, "the rollout engine failed: "), (2, r"failed again, after 2 rebuilds \(faults\.")])
def test_an_engine_is_rebuilt_so_often_and_no_more(
    sampler: ResponseSampler, folder: Path, monkeypatch: pytest.MonkeyPatch, rebuilds: int, message: str
) -> None:
    sampler = with_recovery(sampler, folder, rebuilds)
    fail(sampler, monkeypatch, 9)
    with pytest.raises(StepAbandoned, match=rf"{message}.*rank 0: RuntimeError: the device is lost"):
        sample(sampler)
    assert sampler.engine_rebuilds == rebuilds


def opened() -> OpenResponses:
    """Two segments of the same responses fit: 12 tokens, at most 5 a step."""
    config = make_config(
        rollout={"max_response_length": 12, "horizon": {"tokens": 5, "in_flight": 16}},
        policy_loss={"importance_correction": {"kind": "token_truncate"}},
        advantage={"lambda_policy": {"kind": "fixed"}},
    )
    return OpenResponses(config, replica=0, replicas=1)


def continued(sampler: ResponseSampler, responses: OpenResponses, step: int) -> Round:
    drawn = ASKED if step == 1 else []
    return sampler.continue_open(responses, drawn, SAMPLING, seed_step=step, timer=PhaseTimer(), show=lambda rows: range(rows))[0]


def test_after_a_rebuild_open_responses_are_continued_with_the_same_tokens(
    sampler: ResponseSampler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened()
    rounds = [continued(sampler, expected, step) for step in (1, 2, 3)]
    assert [len(part.rows) for part in rounds][2] > 0 and not expected.table  # 12 tokens are three segments
    sampler = with_recovery(sampler, folder, rebuilds=1)
    found = opened()
    continued(sampler, found, 1)
    fail(sampler, monkeypatch, 1)
    again = [continued(sampler, found, step) for step in (2, 3)]
    assert sampler.engine_rebuilds == 1
    for one, other in zip(again, rounds[1:], strict=True):
        assert one.rows.prompt_id == other.rows.prompt_id
        assert one.rows.segments == other.rows.segments
        for name in ("tokens", "rollout_logprobs", "response_mask"):
            assert torch.equal(one.local[name], other.local[name])
        assert one.shown == other.shown and len(one.shown) == len(one.rows)


def test_a_step_that_is_lost_leaves_the_open_responses_alone(
    sampler: ResponseSampler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = opened()
    continued(sampler, responses, 1)
    before, part = responses.state_dict(), responses.part()
    assert len(before["responses"]) > 3
    sampler = with_recovery(sampler, folder, rebuilds=0)
    fail(sampler, monkeypatch, 9)
    with pytest.raises(StepAbandoned, match="the device is lost"):
        continued(sampler, responses, 2)
    assert responses.state_dict() == before
    assert all(torch.equal(part[name], found) for name, found in responses.part().items())


def test_a_new_engine_that_cannot_be_had_ends_the_step(sampler: ResponseSampler, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> None:
        raise AssertionError("no memory for the KV cache")

    sampler = with_recovery(sampler, folder, rebuilds=1)
    fail(sampler, monkeypatch, 1)
    monkeypatch.setattr(sampler.engine, "_rebuild", no_memory)
    with pytest.raises(
        StepAbandoned, match=r"the device is lost.* and cannot be rebuilt: no new rollout engine: AssertionError: no memory for"
    ):
        sample(sampler)


def test_an_engine_that_keeps_its_memory_asks_for_a_new_process(
    sampler: ResponseSampler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remains() -> None:
        raise EngineRemains("the failed engine still holds device memory")

    sampler = with_recovery(sampler, folder, rebuilds=1)
    fail(sampler, monkeypatch, 1)
    monkeypatch.setattr(sampler.engine, "_rebuild", remains)
    with pytest.raises(StepAbandoned, match=r"the device is lost.* and cannot be rebuilt: the failed engine still holds") as caught:
        sample(sampler)
    assert caught.value.exit_code == EXIT_REQUEUE


def test_graders_that_are_gone_end_the_step(sampler: ResponseSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> None:
        raise RewardError("no process stays alive")

    monkeypatch.setattr(sampler.verifiers, "grade", gone)
    with pytest.raises(StepAbandoned, match="rank 0: no process stays alive"):
        sample(sampler)


def test_without_a_trainer_nothing_is_rebuilt(sampler: ResponseSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(sampler, monkeypatch, 1)
    with pytest.raises(StepAbandoned, match="the rollout engine failed: rank 0: RuntimeError"):
        sample(sampler)
