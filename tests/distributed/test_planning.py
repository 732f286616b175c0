"""What the plan says against what four (or six) processes hold: state exactly, activations from the allocator's own events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import run_torchrun

WORKER = Path(__file__).parent / "planning" / "worker.py"
QUICK = ("tiny", "tiny_tied_interleaved_full", "tiny_data_parallel")
MIXTURES = ("tiny_mixture", "tiny_mixture_whole_experts_selective")
SLOW = ("tiny_bfloat16_selective", "tiny_full", "tiny_interleaved", "smollm2")
WIDE = ("smollm2_1.7b_two_layers",)  # alone, since it takes 16 GB
SIX_RANKS = ("smollm2_tp3_pp2",)
ROLES = ("policy", "critic")


RUNS = [QUICK, *(pytest.param(run, marks=pytest.mark.slow) for run in (MIXTURES, SLOW, WIDE, SIX_RANKS))]


@pytest.fixture(scope="module", params=RUNS, ids=["quick", "mixtures", "slow", "wide", "six_ranks"])
def cases(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    result = run_torchrun(WORKER, 6 if request.param == SIX_RANKS else 4, *request.param, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert tuple(line["case"] for line in lines) == request.param
    return {line["case"]: line for line in lines}


def _predicted(case: dict[str, Any], rank: dict[str, Any]) -> dict[str, Any]:
    return case["plan"]["stages"][rank["stage"]]


def test_weights_gradients_and_optimizer_are_exact_on_every_rank(cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        for rank in case["ranks"]:
            for role in ROLES:
                assert rank[role] == _predicted(case, rank)[role][rank["data"]], (name, rank["stage"], rank["data"], role)


def test_host_bytes_are_exact(cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        assert max(rank["host"] for rank in case["ranks"]) == case["plan"]["host"], name


@pytest.mark.parametrize("role", ROLES)
def test_device_bytes_of_an_update(cases: dict[str, dict[str, Any]], role: str) -> None:
    """State and activations together, in the updates, where a rank holds most."""
    for name, case in cases.items():
        for rank in case["ranks"]:
            state = sum(rank[role].values())
            ratio = (state + _predicted(case, rank)[f"{role}_train"]) / (state + rank[f"{role}_train"])
            print(f"{name}, stage {rank['stage']}, {role} update: predicted / measured = {ratio:.3f}")
            assert 0.95 <= ratio <= 1.05, (name, rank["stage"], ratio)


@pytest.mark.parametrize("role", ROLES)
def test_device_bytes_of_forward_passes(cases: dict[str, dict[str, Any]], role: str) -> None:
    for name, case in cases.items():
        for rank in case["ranks"]:
            state = rank[role]["params"]
            ratio = (state + _predicted(case, rank)[f"{role}_forward"]) / (state + rank[f"{role}_forward"])
            print(f"{name}, stage {rank['stage']}, {role} forward: predicted / measured = {ratio:.3f}")
            assert 0.95 <= ratio <= 1.05, (name, rank["stage"], ratio)


def test_short_ways_are_the_same(cases: dict[str, dict[str, Any]]) -> None:
    """State without building a model, and activations from two and three layers, equal those of the whole models."""
    for name, case in cases.items():
        for facts in case["plan"]["stages"]:
            assert facts["policy_same"] == facts["critic_same"] == [True, True], name
