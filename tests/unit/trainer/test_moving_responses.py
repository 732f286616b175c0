"""Open responses that move between replicas: a step of the real sampler on two ranks, which are threads here, against one replica."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.rollout.test_multi_turn import Letters
from tests.unit.trainer import test_open_responses, test_open_turns
from tests.unit.trainer.test_open_responses import PROBLEMS, Run, configured
from vapo_mcore.config import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.environments import Reply, TurnRequest
from vapo_mcore.errors import RewardError, StepAbandoned
from vapo_mcore.experience.collecting import SamplingCounts, collect
from vapo_mcore.experience.open_responses import OpenResponses
from vapo_mcore.experience.sampling import ResponseSampler, Round
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rewards.pool import Verdict
from vapo_mcore.rollout.base import Generation, GenerationRequest

STEPS = 12
SETTINGS = {"tokens": 4, "in_flight": 24, "train": "segments"}
CONFIGS = {"one turn": configured(SETTINGS), "turns": test_open_turns.with_turns(SETTINGS)}
Step = tuple[Round, SamplingCounts]


@dataclass
class Engine:
    replica_index: int
    num_replicas: int
    write: Callable[[GenerationRequest], Generation]
    is_replica_leader: bool = True
    max_running: int | None = None

    def generate(self, requests: Sequence[Any], _: Any) -> list[Any]:
        return [self.write(request) for request in requests]


def sampler_of(rank: int, ranks: int, config: Config) -> ResponseSampler:
    """The real sampler with the engine, and the environment, of the tests of open responses."""
    verifiers: Any = SimpleNamespace(
        take_restarts=lambda: 0,
        grade=lambda items: [Verdict(1.0, True, None, 0.0) for _ in items],
        respond=lambda _, turns: [test_open_turns.reply(turn) for turn in turns],
    )
    if config.rollout.environment is None:
        tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
        engine: Any = Engine(rank, ranks, test_open_responses.generate)
        return ResponseSampler(engine, verifiers, tokenizer, config.seed)
    engine = Engine(rank, ranks, test_open_turns.generate)
    return ResponseSampler(engine, verifiers, Letters(), config.seed, test_open_turns.TurnsRun.multi_turn)


def steps(rank: int, ranks: int, config: Config) -> list[Step]:
    run, responses = Run(config, ranks), OpenResponses(config, replica=rank, replicas=ranks, prompts=PROBLEMS)
    sampler = sampler_of(rank, ranks, config)

    def draw(count: int) -> list[Prompt]:
        found = list(run.prompts(count))
        run.drawn += count
        return found

    return [
        collect(config, sampler, draw, seed_step=number, timer=PhaseTimer(), dynamic=False, open_responses=responses)
        for number in range(1, STEPS + 1)
    ]


def tokens(found: Step) -> list[tuple[str, int, list[int]]]:
    """Of the responses whose tokens this rank holds."""
    local = found[0].local
    parts = local["tokens"].split(local.lengths.tolist())
    names = zip(local.rows.prompt_id, local.rows.sample_index.tolist(), strict=True)
    return [(*name, part.tolist()) for name, part in zip(names, parts, strict=True)]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_step_whose_environment_is_gone_leaves_the_open_responses_alone(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["turns"]
    sampler, responses = sampler_of(0, 1, config), OpenResponses(config, replica=0, replicas=1, prompts=PROBLEMS)
    run, sampling = Run(config, 1), test_open_turns.SAMPLING

    def continued(step: int) -> Round:
        fresh = list(run.prompts(responses.vacancies))
        return sampler.continue_open(responses, fresh, sampling, seed_step=step, timer=PhaseTimer(), show=range)[0]

    continued(1)
    before, part = responses.state_dict(), responses.part()
    calls = iter(range(100))

    def gone(_: str, turns: Sequence[TurnRequest]) -> list[Reply]:
        if next(calls) == 1:  # after the first turns of the step
            raise RewardError("no worker process stays alive")
        return [test_open_turns.reply(turn) for turn in turns]

    with monkeypatch.context() as patched:
        patched.setattr(sampler.verifiers, "respond", gone)
        with pytest.raises(StepAbandoned, match="rank 0: no worker process stays alive"):
            continued(2)
    assert responses.state_dict() == before
    assert all(torch.equal(part[name], found) for name, found in responses.part().items())
    assert len(continued(2).rows) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_two_replicas_that_swap_responses_sample_what_one_samples(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place, barrier = threading.local(), threading.Barrier(2)
    box: list[Any] = [None, None]

    def gather(parts: list[Any], value: Any, group: Any = None) -> None:
        box[place.rank] = copy.deepcopy(value)
        barrier.wait(60)
        parts[:] = copy.deepcopy(box)
        barrier.wait(60)

    found: dict[int, list[Step]] = {}

    def ranked(rank: int) -> None:
        place.rank = rank
        try:
            found[rank] = steps(rank, 2, CONFIGS[name])
        except BaseException:
            barrier.abort()  # the other need not wait
            raise

    with monkeypatch.context() as patched:
        patched.setattr(dist, "all_gather_object", gather)
        patched.setattr(dist, "get_world_size", lambda group=None: 2)
        patched.setattr(dist, "get_rank", lambda group=None: place.rank)
        patched.setattr(dist, "is_initialized", lambda: True)
        threads = [threading.Thread(target=ranked, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert sorted(found) == [0, 1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone = steps(0, 1, CONFIGS[name])
    finally:
        dist.destroy_process_group()
    for one, first, second in zip(alone, found[0], found[1], strict=True):
        assert first[0].rows.prompt_id == second[0].rows.prompt_id == one[0].rows.prompt_id
        assert first[1] == second[1] and first[1].horizon == one[1].horizon
        assert sorted(tokens(first) + tokens(second)) == sorted(tokens(one))
    assert sum(step[1].moved_tokens for step in found[0]) > 0 == sum(step[1].moved_tokens for step in alone)
