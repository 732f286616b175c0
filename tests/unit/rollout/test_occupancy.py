"""Idle replicas and empty slots from lengths, by hand and against a loop over engine steps."""

from __future__ import annotations

import random

import pytest

from vapo_mcore.experience.occupancy import Occupancy, engine_steps


def one_token_after_another(tokens: list[int], slots: int) -> int:
    waiting, running, steps = list(tokens), [], 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        steps += 1
        running = [left - 1 for left in running if left > 1]
    return steps


def test_shares_by_hand() -> None:
    found = Occupancy.of_lengths([[4, 1], [2, 2]], None)
    assert found == Occupancy(1 - (4 + 2) / 8, 1 - 9 / 16)
    assert Occupancy.of_lengths([[4, 1, 1], [2, 2]], 1) == Occupancy(1 - (6 + 4) / 12, 1 - 10 / 12)
    assert Occupancy.of_lengths([[5], [5]], 256) == Occupancy(0.0, 0.0)
    assert Occupancy.of_lengths([[6], []], None) == Occupancy(0.5, 0.5)
    assert Occupancy.of_lengths([[], []], 4) is None and Occupancy.of_lengths([[0]], None) is None


@pytest.mark.parametrize("slots", [1, 2, 5, 40])
def test_engine_steps_are_those_of_a_loop_over_steps(slots: int) -> None:
    draw = random.Random(slots)
    tokens = [draw.randint(1, 60) for _ in range(30)]
    assert engine_steps(tokens, slots) == one_token_after_another(tokens, slots)
