"""Synchronisations between host and device in a whole RL step: within a budget, and as many for one micro-batch as for many."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forks import run_script
from tests.training_setup import write_setup

BUDGET = {
    "distribution": 16,
    "values": 4,
    "log-probs": 8,
    "advantages and critic update": 90,  # of two updates; GAE and its whitening run on the host
    "policy update": 24,  # of two updates
    "samples, imitation": 24,  # of three responses in the samples file
    "metrics": 6,
}
"""Most synchronisations of each phase; "penalised" has twice as many updates of the policy."""
Case = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """(case) -> "few" and "many" micro-batches: their number, and the synchronisations of each phase by place."""
    folder = write_setup(tmp_path_factory.mktemp("syncs"), model="qwen2_tied")
    result = run_script("tests/fake_cuda/rl_step_worker.py", str(folder), timeout=500, fake_cuda=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    found = json.loads((folder / "syncs.json").read_text())
    assert found["faults"] == []
    return found["cases"]


def growing(case: Case) -> dict[str, tuple[int, int]]:
    """Phase and place -> counts with few and with many micro-batches, where they differ."""
    few, many = (case[packing]["phases"] for packing in ("few", "many"))
    assert case["many"]["microbatches"] >= 4 * case["few"]["microbatches"]
    assert few.keys() == many.keys() == BUDGET.keys()
    places = {(phase, place) for phases in (few, many) for phase, counts in phases.items() for place in counts}
    both = {(phase, place): (few[phase].get(place, 0), many[phase].get(place, 0)) for phase, place in places}
    return {f"{phase}: {place}": counts for (phase, place), counts in both.items() if counts[0] != counts[1]}


@pytest.mark.parametrize("name", ["vapo", "penalised"])
def test_no_synchronisation_for_each_microbatch(cases: dict[str, Case], name: str) -> None:
    assert growing(cases[name]) == {}


@pytest.mark.parametrize("name", ["vapo", "penalised"])
def test_phases_keep_their_budgets(cases: dict[str, Case], name: str) -> None:
    for phase, counts in cases[name]["many"]["phases"].items():
        most = 2 * BUDGET[phase] if (name, phase) == ("penalised", "policy update") else BUDGET[phase]
        assert 0 < sum(counts.values()) <= most, (phase, counts)


def test_a_planted_item_is_found(cases: dict[str, Case]) -> None:
    """The loss reads a number of each micro-batch: its place is named."""
    found = growing(cases["planted"])
    assert len(found) == 1, found
    [(place, (few, many))] = found.items()
    assert place.startswith("policy update: item ") and many - few == 2 * (
        cases["planted"]["many"]["microbatches"] - cases["planted"]["few"]["microbatches"]
    )
