"""The backward recurrence of GAE over packed sequences, compiled by numba.

One pass over the tokens yields the advantages of lambda_policy and the returns of lambda_critic. The recurrence is carried in
float64 whatever the tensors are, so a float32 result is the float64 result rounded once, at any length and any lambda.

Sequences are independent, so contiguous runs of them with about equal token counts go to ``torch.get_num_threads()`` threads;
the compiled code releases the GIL. Threads live for one call: nothing is left behind that a fork or a second caller could
trip over, and a process limited to one thread (``OMP_NUM_THREADS=1``) stays on one. Compilation takes about half a second,
once per process and dtype, at the first call; nothing is written to disk.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Below this many tokens the work (some 2 ns a token) is cheaper than starting threads.
_MIN_TOKENS_PER_THREAD = 1 << 16

# Indices are unsigned (np.uint64) so that numba leaves out its wrap-around of negative ones: half of the time otherwise.
# "contract" permits fused multiply-add; nothing is reassociated and NaN keeps its meaning.


@njit(nogil=True, fastmath={"contract"})
def _gae_range(  # type: ignore[no-untyped-def]
    rewards, values, mask, cu_seqlens, lam_policy, lam_critic, gamma, bootstrap, advantages, returns, first, last
):  # pragma: no cover - runs as machine code
    """Sequences ``first`` to ``last`` (exclusive); writes every position of theirs in ``advantages`` and ``returns``."""
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
            else:  # a gap: nothing is read, nothing decays; the state waits for the next sampled token
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
    """``(advantages, returns)`` in the dtype of ``values``; arguments as in ``advantages.packed_gae_decoupled``, all checked there."""
    # numpy asks for huge pages for its large arrays: the page faults of fresh outputs cost more than the recurrence otherwise.
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
