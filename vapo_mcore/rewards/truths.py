"""Find ground truths that a verifier cannot grade against, before a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_mcore.config.verifiers import MATH_VERIFIERS
from vapo_mcore.rewards.pool import VerifierPool
from vapo_mcore.rewards.types import GradeItem

_TIMEOUT_SECONDS = 10.0
_MAX_WORKERS = 8
_READING = (*MATH_VERIFIERS, "regex", "multiple_choice", "code")
"""Built-in verifiers that reject some ground truths."""

Truth = tuple[str, str, Mapping[str, Any]]
"""(verifier, ground truth, metadata) of a row."""


def truth_faults(truths: Sequence[Truth]) -> list[str | None]:
    """Return for each ground truth why no response can be graded against it, or None.

    Grades an empty response: built-in verifiers then report an unreadable ground truth. Skips user-defined verifiers, which may be slow
    or cost money.
    """
    checked = [number for number, (verifier, _, _) in enumerate(truths) if verifier in _READING]
    found: list[str | None] = [None] * len(truths)
    if checked:
        items = [GradeItem(verifier, "", truth, metadata) for verifier, truth, metadata in (truths[number] for number in checked)]
        with VerifierPool(min(_MAX_WORKERS, os.cpu_count() or 1), _TIMEOUT_SECONDS) as pool:
            for number, verdict in zip(checked, pool.grade(items), strict=True):
                found[number] = verdict.error
    return found
