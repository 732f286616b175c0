"""Masked sums and whitening of packed tokens on the host, compiled by numba: each pass reads the tokens once, without temporaries.

Each block of a fixed number of tokens is summed in float64, and the block sums are added in order, so the result does not depend on the
number of threads. Threads and compilation work as in ``gae_kernel``.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

_BLOCK = 1 << 14
# Below this many tokens the work (about 1 ns per token) is cheaper than starting threads.
_MIN_TOKENS_PER_THREAD = 1 << 18


# Four independent accumulators hide the latency of the addition. Each is compensated (Kahan): the mean of equal numbers is that number to
# within one rounding, which is how constant returns are recognised.


@njit(nogil=True)
def _sum_range(x, mask, sums, counts, block, first, last):  # type: ignore[no-untyped-def]  # pragma: no cover - runs as machine code
    lanes, lost = np.zeros(4), np.zeros(4)
    for b in range(first, last):
        begin, end = np.uint64(b * block), np.uint64(min((b + 1) * block, len(x)))
        count = 0
        s0, s1, s2, s3, c0, c1, c2, c3 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        t = begin
        while t + np.uint64(4) <= end:
            y0 = (np.float64(x[t]) if mask[t] else 0.0) - c0
            y1 = (np.float64(x[t + np.uint64(1)]) if mask[t + np.uint64(1)] else 0.0) - c1
            y2 = (np.float64(x[t + np.uint64(2)]) if mask[t + np.uint64(2)] else 0.0) - c2
            y3 = (np.float64(x[t + np.uint64(3)]) if mask[t + np.uint64(3)] else 0.0) - c3
            n0, n1, n2, n3 = s0 + y0, s1 + y1, s2 + y2, s3 + y3
            c0, c1, c2, c3 = (n0 - s0) - y0, (n1 - s1) - y1, (n2 - s2) - y2, (n3 - s3) - y3
            s0, s1, s2, s3 = n0, n1, n2, n3
            count += mask[t] + mask[t + np.uint64(1)] + mask[t + np.uint64(2)] + mask[t + np.uint64(3)]
            t += np.uint64(4)
        lanes[0], lanes[1], lanes[2], lanes[3] = s0, s1, s2, s3
        lost[0], lost[1], lost[2], lost[3] = c0, c1, c2, c3
        total, rest = 0.0, 0.0
        while t < end:
            if mask[t]:
                y = np.float64(x[t]) - rest
                new = total + y
                rest = (new - total) - y
                total = new
                count += 1
            t += np.uint64(1)
        for lane in range(4):
            y = lanes[lane] - lost[lane] - rest
            new = total + y
            rest = (new - total) - y
            total = new
        sums[b] = total
        counts[b] = count


@njit(nogil=True)
def _square_range(x, mask, sums, mean, block, first, last):  # type: ignore[no-untyped-def]  # pragma: no cover - runs as machine code
    for b in range(first, last):
        s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
        t, end = np.uint64(b * block), np.uint64(min((b + 1) * block, len(x)))
        while t + np.uint64(4) <= end:
            d0 = np.float64(x[t]) - mean if mask[t] else 0.0
            d1 = np.float64(x[t + np.uint64(1)]) - mean if mask[t + np.uint64(1)] else 0.0
            d2 = np.float64(x[t + np.uint64(2)]) - mean if mask[t + np.uint64(2)] else 0.0
            d3 = np.float64(x[t + np.uint64(3)]) - mean if mask[t + np.uint64(3)] else 0.0
            s0, s1, s2, s3 = s0 + d0 * d0, s1 + d1 * d1, s2 + d2 * d2, s3 + d3 * d3
            t += np.uint64(4)
        while t < end:
            d0 = np.float64(x[t]) - mean if mask[t] else 0.0
            s0 += d0 * d0
            t += np.uint64(1)
        sums[b] = (s0 + s1) + (s2 + s3)


@njit(nogil=True, fastmath={"contract"})
def _whiten_range(x, mask, out, mean, deviation, block, first, last):  # type: ignore[no-untyped-def]  # pragma: no cover - runs as machine code
    for t in range(np.uint64(first * block), np.uint64(min(last * block, len(x)))):
        out[t] = (np.float64(x[t]) - mean) / deviation if mask[t] else 0.0


def _over_blocks(run: Callable[[int, int], None], tokens: int, num_threads: int) -> None:
    """Call ``run(first, last)`` on ranges of blocks that cover ``tokens``, one range per thread."""
    blocks = -(-tokens // _BLOCK)
    num_chunks = max(1, min(num_threads, tokens // _MIN_TOKENS_PER_THREAD))
    cuts = np.linspace(0, blocks, num_chunks + 1).astype(np.int64)
    if num_chunks == 1:
        run(0, blocks)
        return
    with ThreadPoolExecutor(num_chunks) as pool:
        list(pool.map(run, cuts[:-1], cuts[1:]))  # list() re-raises what a thread raised


def _exact_sum(sums: NDArray[np.float64]) -> float:
    """Return the sum, rounded once; NaN or infinity if a block has one (``math.fsum`` would raise for opposite infinities)."""
    return math.fsum(sums) if bool(np.isfinite(sums).all()) else float(sums.sum())


def masked_sum(x: NDArray[np.floating], mask: NDArray[np.bool_], num_threads: int) -> tuple[int, float]:
    """Return the count of unmasked tokens and their float64 sum. Masked tokens are not read."""
    sums, counts = np.zeros(-(-len(x) // _BLOCK)), np.zeros(-(-len(x) // _BLOCK), np.int64)
    _over_blocks(lambda first, last: _sum_range(x, mask, sums, counts, _BLOCK, first, last), len(x), num_threads)
    return int(counts.sum()), _exact_sum(sums)


def masked_square_sum(x: NDArray[np.floating], mask: NDArray[np.bool_], mean: float, num_threads: int) -> float:
    """Return the float64 sum of squared deviations from ``mean`` over the unmasked tokens."""
    sums = np.zeros(-(-len(x) // _BLOCK))
    _over_blocks(lambda first, last: _square_range(x, mask, sums, mean, _BLOCK, first, last), len(x), num_threads)
    return _exact_sum(sums)


def whitened(x: NDArray[np.floating], mask: NDArray[np.bool_], mean: float, deviation: float, num_threads: int) -> NDArray[np.floating]:
    """Return (x - mean) / deviation at unmasked tokens, 0 at masked ones, in the dtype of ``x``; computed in float64."""
    out = np.empty(x.shape, x.dtype)
    _over_blocks(lambda first, last: _whiten_range(x, mask, out, mean, deviation, _BLOCK, first, last), len(x), num_threads)
    return out
