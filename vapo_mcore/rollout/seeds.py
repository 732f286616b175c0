"""Sampling seeds: one per response, a pure function of what the response is and of nothing else."""

from __future__ import annotations

import hashlib

SEED_BITS = 63


def sampling_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one response, in ``[0, 2**63)``: the range that vLLM and numpy both take.

    The BLAKE2b hash of the four arguments. It knows nothing of ranks, replicas or batches, so a run has the same seeds under
    another layout and after a resume; and two responses of a run share one with a probability of about n^2 / 2^64 only.
    """
    identity = f"{run_seed}\x00{step}\x00{sample_index}\x00{prompt_id}".encode()
    digest = hashlib.blake2b(identity, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
