"""Balance the rows of a mini-batch over data-parallel ranks, in tokens and in attention-aware cost at the same time.

A sequence of L tokens costs ``L + a L**2``, so balancing tokens and squares balances both. Rows are assigned longest first to the least
loaded rank. The remaining rows will fill a rank's missing tokens and add squares, so squares are compared after subtracting that
forecast. The best weights of forecast and squares depend on the lengths: a few combinations are tried and the best is kept. Exchanges of
single rows with the most loaded rank then refine it.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_GOOD = 0.002  # stop trying combinations at this excess of the peak over the lower bound, in mean loads
_POLISHED = 0.004  # stop exchanging rows at this excess
# (forecast: squares expected per missing token, relative to the mean of the remaining rows; weight of squares relative to tokens)
_COMBINATIONS = np.array([(f, w) for f in (1.0, 1.1, 1.2) for w in (16.0, 32.0, 64.0)] + [(0.0, 0.0)])
_TOKEN_BAND = 0.01  # up to this excess over the mean, a rank's tokens weigh as much as its cost
_PAIRS_PER_ROW = 1000  # bound on the exchange search, in pairs per row of the mini-batch

Loads = NDArray[np.float64]


def balance(tokens: NDArray[np.int64], cost: Loads, token_limits: Loads) -> NDArray[np.int64]:
    """Assign each row to a rank; returns int64 ``[n]``.

    Args:
        tokens: int64 ``[n]``, padded tokens of each row.
        cost: float64 ``[n]``, cost of each row.
        token_limits: float64 ``[ranks]``, tokens that a rank should not exceed (inf: no limit). Best-effort: rows that fit on no
            rank go to the rank with the fewest tokens.
    """
    ranks = token_limits.size
    if ranks == 1 or tokens.size == 0:
        return np.zeros(tokens.size, dtype=np.int64)
    order = np.argsort(-tokens, kind="stable")
    squares = tokens.astype(np.float64) ** 2
    # All loads are in units of the mean over ranks.
    share = np.stack([tokens / tokens.sum(), squares / squares.sum()], axis=1) * ranks
    measured = np.stack([share[:, 0], cost / cost.sum() * ranks], axis=1)
    limits = token_limits / tokens.sum() * ranks
    free = np.isinf(limits)
    least_peak = max(1.0, (ranks - limits[~free].sum()) / max(free.sum(), 1))
    owner, load = _best_of(_COMBINATIONS, order, share, measured, limits, least_peak + _GOOD)
    _polish(measured, limits, owner, load, least_peak + _POLISHED, _PAIRS_PER_ROW * tokens.size)
    return owner


@njit(cache=True)
def _best_of(combinations, order, share, measured, limits, goal):  # type: ignore[no-untyped-def]
    """Return the best assignment of all (forecast, weight) combinations, or the first that reaches ``goal``, and its loads."""
    best, best_load, best_peak = np.empty(0, dtype=np.int64), np.empty((0, 2)), np.inf
    for k in range(combinations.shape[0]):
        owner = _assign(order, share, limits, combinations[k, 0], combinations[k, 1])
        load = np.zeros((limits.size, 2))
        for row in range(owner.size):
            load[owner[row], 0] += measured[row, 0]
            load[owner[row], 1] += measured[row, 1]
        peak = _highest(load)[1]
        if peak < best_peak:
            best, best_load, best_peak = owner, load, peak
        if best_peak <= goal:
            break
    return best, best_load


@njit(cache=True)
def _assign(order, share, limits, forecast, weight):  # type: ignore[no-untyped-def]
    """Greedily assign each row to the rank whose (tokens, forecast-corrected squares) have the smallest inner product with the row's."""
    ranks = limits.size
    owner = np.empty(order.size, dtype=np.int64)
    load = np.zeros((ranks, 2))
    left_tokens, left_squares = float(ranks), float(ranks)
    for row in order:
        expected = forecast * left_squares / left_tokens
        tokens, squares = share[row, 0], share[row, 1]
        pull = weight * (squares - expected * tokens)
        best, best_score, emptiest = -1, np.inf, 0
        for rank in range(ranks):
            score = pull * (load[rank, 1] - expected * load[rank, 0]) + tokens * load[rank, 0]
            if score < best_score and load[rank, 0] + tokens <= limits[rank]:
                best, best_score = rank, score
            if load[rank, 0] < load[emptiest, 0]:
                emptiest = rank
        if best < 0:
            best = emptiest
        owner[row] = best
        load[best, 0] += tokens
        load[best, 1] += squares
        left_tokens = max(left_tokens - tokens, 1e-12)
        left_squares = max(left_squares - squares, 0.0)
    return owner


@njit(cache=True)
def _peak(tokens, cost):  # type: ignore[no-untyped-def]
    """Return the load that is minimised: the larger of cost and tokens, tokens beyond ``_TOKEN_BAND`` over the mean weighing a tenth.

    Cost determines the time. Tokens are balanced too where the lengths allow both; otherwise cost takes precedence.
    """
    return max(cost, min(tokens, 1 + _TOKEN_BAND + 0.1 * (tokens - 1 - _TOKEN_BAND)))


@njit(cache=True)
def _highest(load):  # type: ignore[no-untyped-def]
    """Return the most loaded rank and its peak."""
    worst, highest = 0, -np.inf
    for rank in range(load.shape[0]):
        peak = _peak(load[rank, 0], load[rank, 1])
        if peak > highest:
            worst, highest = rank, peak
    return worst, highest


@njit(cache=True)
def _best_exchange(measured, limits, owner, load, worst):  # type: ignore[no-untyped-def]
    """Return the row to move away from ``worst`` and the row to take in exchange; an index from ``rows`` on is a rank that gives none.

    The pair minimises the higher peak of the two ranks; -1 if no exchange lowers the current peak.
    """
    rows, ranks = owner.size, limits.size
    best, best_out, best_in = _peak(load[worst, 0], load[worst, 1]) - 1e-9, -1, -1
    for out in range(rows):
        if owner[out] != worst:
            continue
        for into in range(rows + ranks):
            rank = owner[into] if into < rows else into - rows
            if rank == worst:
                continue
            tokens, cost = measured[out, 0], measured[out, 1]
            if into < rows:
                tokens -= measured[into, 0]
                cost -= measured[into, 1]
            here = _peak(load[worst, 0] - tokens, load[worst, 1] - cost)
            there = _peak(load[rank, 0] + tokens, load[rank, 1] + cost)
            if load[worst, 0] - tokens > limits[worst] or load[rank, 0] + tokens > limits[rank]:
                continue
            if max(here, there) < best:
                best, best_out, best_in = max(here, there), out, into
    return best_out, best_in


@njit(cache=True)
def _polish(measured, limits, owner, load, goal, budget):  # type: ignore[no-untyped-def]
    """Repeat the best exchange of the most loaded rank until the peak reaches ``goal``, none helps, or ``budget`` pairs are examined."""
    rows, ranks = owner.size, limits.size
    while budget > 0:
        worst, peak = _highest(load)
        if peak <= goal:
            return
        out, into = _best_exchange(measured, limits, owner, load, worst)
        if out < 0:
            return
        budget -= np.sum(owner == worst) * (rows + ranks)
        rank = owner[into] if into < rows else into - rows
        for k in range(2):
            change = measured[out, k] - (measured[into, k] if into < rows else 0.0)
            load[worst, k] -= change
            load[rank, k] += change
        owner[out] = rank
        if into < rows:
            owner[into] = worst
