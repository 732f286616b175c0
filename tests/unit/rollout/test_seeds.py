"""Scenario 19: a hash of (run seed, step, prompt id, sample index), none shared, unchanged under another layout."""

from __future__ import annotations

import hashlib
from itertools import product

from vapo_mcore.rollout.seeds import sampling_seed


def test_values_never_change_between_versions() -> None:
    """A resumed run must sample what the interrupted one would have."""
    assert sampling_seed(1234, 0, "a", 0) == 5897384065176255107
    assert (
        sampling_seed(1234, 7, "gsm8k/train/12", 3)
        == int.from_bytes(hashlib.blake2b(b"1234\x007\x003\x00gsm8k/train/12", digest_size=8).digest(), "little") // 2
    )


def test_segments_have_seeds_of_their_own_and_the_first_that_of_a_run_without_them() -> None:
    assert sampling_seed(1234, 7, "a", 3, 0) == sampling_seed(1234, 7, "a", 3)
    assert (
        sampling_seed(1234, 7, "a", 3, 2)
        == int.from_bytes(hashlib.blake2b(b"1234\x007\x003/2\x00a", digest_size=8).digest(), "little") // 2
    )
    seeds = [sampling_seed(1, step, "a", sample, segment) for step, sample, segment in product(range(9), range(9), range(9))]
    assert len(set(seeds)) == 9**3


def test_all_distinct_and_in_range() -> None:
    keys = list(product((0, 1, 1234), range(12), [f"set/{i}" for i in range(50)] + ["", "1", "é"], range(16)))
    seeds = [sampling_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert min(seeds) >= 0 and max(seeds) < 2**63
    assert max(seeds) > 2**62  # the whole range is used


def test_arguments_cannot_run_into_each_other() -> None:
    keys = [(1, 11, "x", 1), (11, 1, "x", 1), (1, 1, "x", 11), (1, 1, "1x", 1)]
    assert len({sampling_seed(*key) for key in keys}) == 4
