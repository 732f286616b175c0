"""Compute how much of a rollout the replicas spend without work, in engine steps, from the lengths of what they sampled."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Occupancy:
    """Shares of a rollout's engine steps, until the slowest replica has sampled its last token.

    Attributes:
        idle: share of the replicas' steps in which a replica has no response left to sample.
        empty: share of slot steps without a running response; includes ``idle``.
    """

    idle: float
    empty: float

    @classmethod
    def of_lengths(cls, tokens: Sequence[Sequence[int]], slots: int | None) -> Self | None:
        """Compute from ``tokens``: of each replica, the sampled tokens of its responses in the order in which they start.

        A replica has ``slots`` slots, or as many as the fullest replica has responses, if these are fewer or ``slots`` is None. It samples
        one token of each running response in an engine step. Prefills and a full key-value cache are not counted. None without tokens.
        """
        fullest = max(map(len, tokens), default=0)
        width = fullest if slots is None else min(slots, fullest)
        steps = [engine_steps(mine, width) for mine in tokens]
        longest = max(steps, default=0)
        if longest == 0:
            return None
        return cls(1 - sum(steps) / (len(steps) * longest), 1 - sum(map(sum, tokens)) / (len(steps) * longest * width))


def engine_steps(tokens: Sequence[int], slots: int) -> int:
    """Return the engine steps of a replica that starts its responses in order, each when a slot is free."""
    ends: list[int] = []
    for count in tokens:
        if len(ends) < slots:
            heapq.heappush(ends, count)
        else:
            heapq.heapreplace(ends, ends[0] + count)
    return max(ends, default=0)
