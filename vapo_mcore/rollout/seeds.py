"""Sampling seeds: one per response, a pure function of the response's identity."""

from __future__ import annotations

import hashlib

SEED_BITS = 63


def sampling_seed(run_seed: int, step: int, prompt_id: str, sample_index: int, segment: int = 0) -> int:
    """Return the seed of one response, in ``[0, 2**63)``, the range that both vLLM and numpy accept.

    It is a BLAKE2b hash of the arguments, independent of ranks, replicas and batches, so it does not change with the layout or after
    a resume. ``segment`` counts the steps in which the response was continued (``rollout.horizon``). The probability that any two of a
    run's n responses share a seed is about n^2 / 2^64.
    """
    sample = f"{sample_index}/{segment}" if segment else f"{sample_index}"
    identity = f"{run_seed}\x00{step}\x00{sample}\x00{prompt_id}".encode()
    digest = hashlib.blake2b(identity, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
