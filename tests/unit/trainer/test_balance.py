"""Swaps of open responses between replicas: equal numbers, equal work, few moves."""

from __future__ import annotations

import random

import pytest

from vapo_mcore.experience.balance import balanced


def loads(places: list[int], work: list[int], replicas: int) -> list[int]:
    return [sum(w for place, w in zip(places, work, strict=True) if place == replica) for replica in range(replicas)]


def test_one_swap_by_hand() -> None:
    """30 against 10: swapping 12 for 2 makes it 20 and 20."""
    assert balanced([0, 0, 0, 1, 1, 1], [12, 10, 8, 2, 3, 5], 2) == [1, 0, 0, 0, 1, 1]


def test_nothing_moves_that_need_not() -> None:
    assert balanced([0, 1, 0, 1], [7, 7, 7, 7], 2) == [0, 1, 0, 1]
    assert balanced([0, 0, 1, 1], [1000, 1001, 1001, 1000], 2) == [0, 0, 1, 1]
    assert balanced([0, 1], [9, 1], 2) == [0, 1]  # a swap would only mirror it
    assert balanced([0, 0], [5, 6], 3) == [0, 0]  # replicas without responses have nothing to give in return
    assert balanced([], [], 4) == []


@pytest.mark.parametrize("replicas", [2, 5, 32])
def test_work_becomes_equal_with_few_moves(replicas: int) -> None:
    draw = random.Random(replicas)
    each = 64
    work = [int(1000 * draw.lognormvariate(3, 1)) for _ in range(replicas * each)]
    before = [number // each for number in range(replicas * each)]
    after = balanced(before, work, replicas)
    assert [after.count(replica) for replica in range(replicas)] == [each] * replicas
    mean = sum(work) / replicas
    assert max(loads(before, work, replicas)) - min(loads(before, work, replicas)) > 0.15 * mean
    assert max(loads(after, work, replicas)) - min(loads(after, work, replicas)) <= 0.0101 * mean
    assert sum(a != b for a, b in zip(before, after, strict=True)) < 0.15 * len(work)
    assert balanced(after, work, replicas) == after


def test_large_work_does_not_overflow() -> None:
    """2 x 20,480 tokens with a context of a million, of thousands of responses."""
    places, work = [n % 4 for n in range(8000)], [20_480 * 2_000_000 + n for n in range(8000)]
    assert balanced(places, work, 4) == places
