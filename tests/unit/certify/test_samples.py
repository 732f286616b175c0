"""The engine check samples every request once, each replica its own share of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vapo_mcore.certify.checks import engine


@pytest.mark.parametrize(("replicas", "prompts"), [(1, 8), (2, 8), (3, 8), (16, 8), (20, 8), (4, 1)])
def test_replicas_share_the_requests(replicas: int, prompts: int) -> None:
    known = [SimpleNamespace(prompt_id=f"p{number}", token_ids=[number]) for number in range(prompts)]
    shares: list[list[Any]] = []
    for index in range(replicas):
        bench: Any = SimpleNamespace(
            config=SimpleNamespace(seed=1, rollout=SimpleNamespace(max_response_length=5)),
            checked_prompts=lambda count: known[:count],
            engine=SimpleNamespace(replica_index=index, num_replicas=replicas, generate=lambda requests, _: requests),
        )
        shares.append([(one.prompt_id, one.sample_index) for one in engine.sample(bench, 1.0)])
    everything = {(f"p{number}", index) for number in range(prompts) for index in range(engine.SAMPLES)}
    assert all(shares)
    assert {one for share in shares for one in share} == everything
    if replicas <= len(everything):
        assert sum(map(len, shares)) == len(everything)
