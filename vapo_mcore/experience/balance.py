"""Balance the open responses over the replicas by expected work, with few moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 0.01
"""Stop swapping when the replicas with the most and the least work differ by less than this share of the mean."""
SWAPS_PER_REPLICA = 8
"""Maximum number of swaps per step and replica; about two are needed if a step replaces a tenth of the responses."""


def balanced(places: Sequence[int], work: Sequence[int], replicas: int) -> list[int]:
    """Return the replica of each response after swaps that even out ``work``; each replica keeps its number of responses.

    Repeatedly the replicas with the most and the least work swap the two responses that come closest to halving the difference. All
    arithmetic is on integers, so all ranks get the same.
    """
    placed, loads = np.array(places, dtype=np.int64), np.array(work, dtype=np.int64)
    sums = np.zeros(replicas, dtype=np.int64)
    np.add.at(sums, placed, loads)
    tolerance = int(TOLERANCE * (int(sums.sum()) // replicas))
    for _ in range(SWAPS_PER_REPLICA * replicas):
        most, least = int(sums.argmax()), int(sums.argmin())
        gap = int(sums[most] - sums[least])
        if gap <= tolerance:
            break
        pair = _best_swap(loads, (placed == most).nonzero()[0], (placed == least).nonzero()[0], gap)
        if pair is None:
            break
        given, taken = pair
        placed[given], placed[taken] = least, most
        sums[most] -= loads[given] - loads[taken]
        sums[least] += loads[given] - loads[taken]
    return [int(place) for place in placed]


def _best_swap(work: NDArray[np.int64], given: NDArray[np.int64], taken: NDArray[np.int64], gap: int) -> tuple[int, int] | None:
    """Return the responses (of ``given``, of ``taken``) whose works differ by closest to half of ``gap``; None if no swap helps."""
    if not given.size or not taken.size:
        return None
    order = taken[np.argsort(work[taken], kind="stable")]
    wanted = work[given] - gap // 2
    right = np.searchsorted(work[order], wanted).clip(0, order.size - 1)
    left = (right - 1).clip(0)
    candidates = np.stack([work[given] - work[order[left]], work[given] - work[order[right]]])
    rest = np.abs(gap - 2 * candidates)
    side, place = np.unravel_index(int(rest.argmin()), rest.shape)
    if rest[side, place] >= gap:
        return None
    return int(given[place]), int(order[(left, right)[side][place]])
