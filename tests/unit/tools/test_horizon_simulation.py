"""The discrete-event simulation of benchmarks/horizon.py against a loop over single engine steps and against sums worked out by hand."""

import argparse
from types import ModuleType

import numpy as np
import pytest

from tests.benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def horizon() -> ModuleType:
    return load_benchmark("horizon")


def token_by_token(horizon: ModuleType, work: list[tuple[int, int]], slots: int) -> tuple[float, float, float, int]:
    """Seconds, prefill seconds, slot seconds and peak of cached tokens, one engine step at a time."""
    engine = horizon.Engine()
    waiting, running = list(work), []
    seconds = prefill = slot_seconds = 0.0
    peak = 0
    while waiting or running:
        new = [[horizon.PROMPT_TOKENS + before, tokens] for before, tokens in waiting[: slots - len(running)]]
        del waiting[: len(new)]
        running += new
        start = engine.prefill(sum(cached for cached, _ in new))
        cached = sum(cached for cached, _ in running)
        compute = max(engine.weights, len(running) * engine.computed_token)
        step = compute + engine.latency + engine.cached_token * cached
        seconds += start + step
        prefill += start
        slot_seconds += len(running) * (start + step)
        running = [[cached + 1, left - 1] for cached, left in running]
        peak = max(peak, sum(cached for cached, _ in running))
        running = [response for response in running if response[1]]
    return seconds, prefill, slot_seconds, peak


@pytest.mark.parametrize("slots", [1, 3, 8, 50])
def test_a_replica_takes_as_long_as_its_single_engine_steps(horizon: ModuleType, slots: int) -> None:
    rng = np.random.default_rng(slots)
    work = list(zip(rng.integers(0, 300, 30).tolist(), rng.integers(1, 90, 30).tolist(), strict=True))
    got = horizon.run_replica(horizon.Engine(), work, slots)
    expected = token_by_token(horizon, work, slots)
    assert (got.seconds, got.prefill, got.slot_seconds) == pytest.approx(expected[:3], rel=1e-9)
    assert got.cached == expected[3]


def test_a_replica_without_work_takes_no_time(horizon: ModuleType) -> None:
    assert horizon.run_replica(horizon.Engine(), [], 4) == horizon.ReplicaTimes(0.0, 0.0, 0.0, 0)


def test_new_responses_fill_up_and_swaps_even_out_the_work(horizon: ModuleType) -> None:
    """The replicas of 3 and 1 old responses get 1 and 3 new ones, and swap one of the old ones."""
    places, done = np.array([0, 0, 0, 1, -1, -1, -1, -1]), np.array([800, 800, 800, 800, 0, 0, 0, 0])
    found = horizon.placed(places, done, np.full(8, 100), 2)
    assert sorted(found[:4].tolist()) == [0, 0, 1, 1] and np.bincount(found).tolist() == [4, 4]
    assert (found[:4] != places[:4]).sum() == 1
    fresh = horizon.placed(np.full(4, -1), np.zeros(4, dtype=int), np.array([5, 9, 5, 5]), 2)
    assert fresh.tolist() == [0, 0, 1, 1]


def test_a_horizon_of_the_longest_response_changes_nothing_and_a_short_one_leaves_fewer_slots_empty(horizon: ModuleType) -> None:
    args = argparse.Namespace(replicas=3, slots=16, mean=600.0, sigma=1.0, cap=2048, steps=20, seed=1)
    plain = horizon.simulate(args, 1, None)
    assert horizon.simulate(args, 1, 2048) == plain and plain["reprefilled"] == plain["moved"] == 0
    short = horizon.simulate(args, 1, 128)
    assert short["empty_slots"] < 0.5 * plain["empty_slots"] and short["reprefilled"] > 0
    assert 0 <= short["idle_replicas"] <= short["empty_slots"]
