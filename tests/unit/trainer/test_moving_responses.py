"""Open responses that move between replicas: a step of the real sampler on two ranks, which are threads here, against one replica."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit.trainer.test_open_responses import PROBLEMS, Run, configured, generate
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.experience.collecting import SamplingCounts, collect
from vapo_mcore.experience.open_responses import OpenResponses
from vapo_mcore.experience.sampling import ResponseSampler, Round
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rewards.pool import Verdict

STEPS = 12
CONFIG = configured({"tokens": 4, "in_flight": 24, "train": "segments"})
Step = tuple[Round, SamplingCounts]


@dataclass
class Engine:
    replica_index: int
    num_replicas: int
    is_replica_leader: bool = True
    max_running: int | None = None

    def generate(self, requests: Sequence[Any], _: Any) -> list[Any]:
        return [generate(request) for request in requests]


def steps(rank: int, ranks: int) -> list[Step]:
    run, responses = Run(CONFIG, ranks), OpenResponses(CONFIG, replica=rank, replicas=ranks)
    responses.prompts = PROBLEMS
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    verifiers: Any = SimpleNamespace(take_restarts=lambda: 0, grade=lambda items: [Verdict(1.0, True, None, 0.0) for _ in items])
    engine: Any = Engine(rank, ranks)
    sampler = ResponseSampler(engine, verifiers, tokenizer, CONFIG.seed)

    def draw(count: int) -> list[Prompt]:
        found = list(run.prompts(count))
        run.drawn += count
        return found

    return [
        collect(CONFIG, sampler, draw, seed_step=number, timer=PhaseTimer(), dynamic=False, open_responses=responses)
        for number in range(1, STEPS + 1)
    ]


def tokens(found: Step) -> list[tuple[str, int, list[int]]]:
    """Of the responses whose tokens this rank holds."""
    local = found[0].local
    parts = local["tokens"].split(local.lengths.tolist())
    names = zip(local.rows.prompt_id, local.rows.sample_index.tolist(), strict=True)
    return [(*name, part.tolist()) for name, part in zip(names, parts, strict=True)]


def test_two_replicas_that_swap_responses_sample_what_one_samples(monkeypatch: pytest.MonkeyPatch) -> None:
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
            found[rank] = steps(rank, 2)
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
        alone = steps(0, 1)
    finally:
        dist.destroy_process_group()
    for one, first, second in zip(alone, found[0], found[1], strict=True):
        assert first[0].rows.prompt_id == second[0].rows.prompt_id == one[0].rows.prompt_id
        assert first[1] == second[1] and first[1].horizon == one[1].horizon
        assert sorted(tokens(first) + tokens(second)) == sorted(tokens(one))
    assert sum(step[1].moved_tokens for step in found[0]) > 0 == sum(step[1].moved_tokens for step in alone)
