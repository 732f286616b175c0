"""The closed estimate of a rollout's waiting: by hand, and against the simulation of each response (benchmarks/horizon.py)."""

from __future__ import annotations

import argparse
import math
from types import ModuleType

import numpy as np
import pytest

from tests.benchmark_modules import load_benchmark
from vapo_mcore.planning.waiting import Lengths, Replicas, estimate_waiting


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return load_benchmark("horizon")


def replicas(count: int, responses: int, slots: int) -> Replicas:
    """An engine step takes a second, whatever runs, and a prefill nothing."""
    return Replicas(count, responses, slots, 10.0, lambda running, cached: np.ones_like(running), lambda tokens: 0.0)


HALVES = Lengths(np.array([1.0, 1.0, 0.5, 0.5, 0.0]))  # 2 or 4 tokens, each with probability 1/2


def test_lengths_and_segments_by_hand() -> None:
    assert (HALVES.longest, HALVES.mean, HALVES.context) == (4, 3.0, (1 + 2 * 0.5 + 3 * 0.5) / 3)
    segments = HALVES.segments(3)  # 2 of 3 open responses are in the first segment, 1 in the second, which has one token
    assert segments.survival.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert segments.before[0] == pytest.approx(3 / 3)  # of three open responses one has 3 tokens before
    assert segments.mean == pytest.approx((2 + 3 + 1) / 3)
    whole = HALVES.segments(4)
    assert (whole.mean, whole.before[0], whole.read) == (3.0, 0.0, (2**2 / 2 + 4**2 / 2) / 2)
    assert whole.square == (4 + 16) / 2


def test_a_step_by_hand() -> None:
    """Two replicas of two responses: one takes 4 steps with probability 3/4 (else 2), the slower one with probability 15/16."""
    found = estimate_waiting(HALVES, replicas(2, 2, 2), None)
    assert found.tokens == 6.0
    assert found.seconds == pytest.approx(4 - 2 / 16)
    assert found.idle == pytest.approx(((4 - 2 / 16) - (4 - 2 / 4)) / found.seconds)
    assert found.empty == pytest.approx(1 - 6 / (2 * found.seconds))


def test_lognormal_lengths_have_their_mean_and_their_tail() -> None:
    lengths = Lengths.lognormal(600.0, 0.5, 20_000)
    assert lengths.mean == pytest.approx(600.0, abs=1.0)  # rounded up to whole tokens
    draws = np.ceil(np.random.default_rng(0).lognormal(math.log(600) - 0.125, 0.5, 200_000))
    for tokens in (300, 600, 1200):
        assert lengths.survival[tokens] == pytest.approx(float((draws > tokens).mean()), abs=4e-3)
    assert Lengths.lognormal(600.0, 1.0, 700).survival[699] > 0.1 and Lengths.lognormal(600.0, 1.0, 700).longest == 700


@pytest.mark.parametrize(
    ("waves", "horizon"), [(1, None), (1, 1024), (1, 512), (1, 256), (2, None), (2, 1024), (2, 512), (4, None), (4, 512)]
)
def test_the_estimate_is_near_the_simulation(simulation: ModuleType, waves: int, horizon: int | None) -> None:
    """With a queue and a horizon that cuts most responses, segments end together, while the estimate takes their rests at random: a step
    of two waves and 256 tokens is estimated 10 % too long."""
    args = argparse.Namespace(replicas=6, slots=48, mean=900.0, sigma=1.0, cap=3072, steps=24, seed=2)
    simulated, estimated = simulation.simulate(args, waves, horizon), simulation.estimate(args, waves, horizon)
    assert estimated["step_s"] == pytest.approx(simulated["step_s"], rel=0.08)
    assert estimated["tokens_per_second"] == pytest.approx(simulated["tokens_per_second"], rel=0.08)
    assert estimated["empty_slots"] == pytest.approx(simulated["empty_slots"], abs=0.06)
    assert estimated["idle_replicas"] == pytest.approx(simulated["idle_replicas"], abs=0.05)
    assert estimated["prefill"] == pytest.approx(simulated["prefill"], abs=0.02)
