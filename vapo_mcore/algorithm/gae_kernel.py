"""The backward recurrence of GAE over packed sequences, compiled by numba.

One pass over the tokens computes the advantages with lambda_policy and the returns with lambda_critic. The recurrence always runs in
float64, so a float32 result is the float64 result rounded once, at any length and any lambda.

Sequences are independent: contiguous ranges with about equal token counts are distributed over ``torch.get_num_threads()`` threads;
the compiled code releases the GIL. The threads end with the call, so a later fork or a concurrent caller is safe, and a process
limited to one thread (``OMP_NUM_THREADS=1``) starts none. numba compiles on the first call, for about half a second per process
and dtype, and caches nothing on disk.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Below this many tokens the work (about 2 ns per token) is cheaper than starting threads.
_MIN_TOKENS_PER_THREAD = 1 << 16

# Unsigned indices (np.uint64) avoid numba's wrap-around of negative indices, which would double the time.
# "contract" permits fused multiply-add; it does not reassociate, and NaN still propagates.


@njit(nogil=True, fastmath={"contract"})
def _gae_range(  # type: ignore[no-untyped-def]
    rewards, values, mask, cu_seqlens, lam_policy, lam_critic, gamma, bootstrap, advantages, returns, first, last
):  # pragma: no cover - runs as machine code
    """Process sequences ``first`` to ``last`` (exclusive); writes all their positions of ``advantages`` and ``returns``."""
    for i in range(first, last):
        decay_policy = gamma * lam_policy[i]
        decay_critic = gamma * lam_critic[i]
        next_value = bootstrap[i]
        advantage_policy = 0.0
        advantage_critic = 0.0
        t = np.uint64(cu_seqlens[i + 1])
        for _ in range(cu_seqlens[i + 1] - cu_seqlens[i]):
            t -= np.uint64(1)
            if mask[t]:
                value = np.float64(values[t])
                delta = np.float64(rewards[t]) + gamma * next_value - value
                advantage_policy = delta + decay_policy * advantage_policy
                advantage_critic = delta + decay_critic * advantage_critic
                next_value = value
                advantages[t] = advantage_policy
                returns[t] = advantage_critic + value
            else:  # masked: keep the state, without decay, for the previous sampled token
                advantages[t] = 0.0
                returns[t] = 0.0


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    mask: NDArray[np.bool_],
    cu_seqlens: NDArray[np.int64],
    lam_policy: NDArray[np.float64],
    lam_critic: NDArray[np.float64],
    gamma: float,
    bootstrap: NDArray[np.float64],
    num_threads: int,
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Return ``(advantages, returns)`` in the dtype of ``values``; ``advantages.packed_gae_decoupled`` has checked the arguments."""
    # np.empty requests huge pages for large arrays; with small pages the page faults cost more than the recurrence.
    advantages = np.empty(values.shape, values.dtype)
    returns = np.empty(values.shape, values.dtype)
    num_sequences = len(cu_seqlens) - 1
    num_chunks = max(1, min(num_threads, len(values) // _MIN_TOKENS_PER_THREAD, num_sequences))
    cuts = np.searchsorted(cu_seqlens, np.linspace(0, len(values), num_chunks + 1))
    cuts[0], cuts[-1] = 0, num_sequences

    def run(first: int, last: int) -> None:
        _gae_range(rewards, values, mask, cu_seqlens, lam_policy, lam_critic, gamma, bootstrap, advantages, returns, first, last)

    if num_chunks == 1:
        run(0, num_sequences)
    else:
        with ThreadPoolExecutor(num_chunks) as pool:
            list(pool.map(run, cuts[:-1], cuts[1:]))  # list() re-raises what a thread raised
    return advantages, returns
