"""Moments and whitening of packed tokens on the host, compiled by numba; both read the tokens from memory once.

The moments are computed in float64 for each block of a fixed number of tokens, which stays in the L2 cache for the second of its two
passes (mean, then squared deviations). So they do not depend on the number of threads. Threads and compilation work as in ``gae_kernel``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

_BLOCK = 1 << 14
# A block is added up in rows of this many tokens, so that vector instructions can add several positions of a row at once.
_ROW = 1 << 8
# Below this many tokens the work (about 1 ns per token) is cheaper than starting threads.
_MIN_TOKENS_PER_THREAD = 1 << 18


@njit(nogil=True)
def _moments_range(x, mask, counts, sums, squares, block, first, last):  # type: ignore[no-untyped-def]  # pragma: no cover - runs as machine code
    """Write count, sum and squared deviations from the block's mean of blocks ``first`` to ``last`` (exclusive).

    Lane i adds the tokens at position i of each row. The sums are compensated (Kahan): the mean of equal numbers is that number to within
    one rounding, which is how constant returns are recognised.
    """
    lanes, lost = np.empty(_ROW), np.empty(_ROW)
    for b in range(first, last):
        begin, end = b * block, min((b + 1) * block, len(x))
        count = 0
        for t in range(np.uint64(begin), np.uint64(end)):
            count += mask[t]
        lanes[:], lost[:] = 0.0, 0.0
        for start in range(begin, end, _ROW):
            row, kept = x[start : min(start + _ROW, end)], mask[start : min(start + _ROW, end)]
            for lane in range(np.uint64(len(row))):
                value = np.float64(row[lane])  # loaded before the choice: only a loop without a branch is vectorised
                y = (value if kept[lane] else 0.0) - lost[lane]
                new = lanes[lane] + y
                lost[lane] = (new - lanes[lane]) - y
                lanes[lane] = new
        total, rest = 0.0, 0.0
        for lane in range(_ROW):
            y = lanes[lane] - lost[lane] - rest
            new = total + y
            rest = (new - total) - y
            total = new
        mean = total / max(count, 1)
        lanes[:] = 0.0
        for start in range(begin, end, _ROW):
            row, kept = x[start : min(start + _ROW, end)], mask[start : min(start + _ROW, end)]
            for lane in range(np.uint64(len(row))):
                deviation = np.float64(row[lane]) - mean
                lanes[lane] += deviation * deviation if kept[lane] else 0.0
        counts[b], sums[b], squares[b] = count, total, lanes.sum()


@njit(nogil=True, fastmath={"contract"})
def _whiten_range(x, mask, out, mean, deviation, block, first, last):  # type: ignore[no-untyped-def]  # pragma: no cover - runs as machine code
    for t in range(np.uint64(first * block), np.uint64(min(last * block, len(x)))):
        white = (np.float64(x[t]) - mean) / deviation  # computed before the choice, as above
        out[t] = white if mask[t] else 0.0


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


def block_moments(x: NDArray[np.floating], mask: NDArray[np.bool_], num_threads: int) -> NDArray[np.float64]:
    """Return the unmasked tokens' count, sum and squared deviations from the block's mean, [3, blocks]. Masked tokens may be NaN."""
    counts, sums, squares = moments = np.empty((3, -(-len(x) // _BLOCK)))
    _over_blocks(lambda first, last: _moments_range(x, mask, counts, sums, squares, _BLOCK, first, last), len(x), num_threads)
    return moments


def whitened(x: NDArray[np.floating], mask: NDArray[np.bool_], mean: float, deviation: float, num_threads: int) -> NDArray[np.floating]:
    """Return (x - mean) / deviation at unmasked tokens, 0 at masked ones, in the dtype of ``x``; computed in float64."""
    out = np.empty(x.shape, x.dtype)
    _over_blocks(lambda first, last: _whiten_range(x, mask, out, mean, deviation, _BLOCK, first, last), len(x), num_threads)
    return out
