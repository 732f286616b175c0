"""Which ground truths a verifier cannot judge against, asked before a run."""

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
"""The built-in verifiers that cannot judge against every text."""

Truth = tuple[str, str, Mapping[str, Any]]
"""(verifier, ground truth, metadata) of a row."""


def truth_faults(truths: Sequence[Truth]) -> list[str | None]:
    """Why no response can be judged against each of these, None where one can. An empty response shows whether a built-in verifier can
    read the ground truth. A user's own verifiers are not asked: they may cost money or time.
    """
    asked = [number for number, (verifier, _, _) in enumerate(truths) if verifier in _READING]
    found: list[str | None] = [None] * len(truths)
    if asked:
        items = [GradeItem(verifier, "", truth, metadata) for verifier, truth, metadata in (truths[number] for number in asked)]
        with VerifierPool(min(_MAX_WORKERS, os.cpu_count() or 1), _TIMEOUT_SECONDS) as pool:
            for number, verdict in zip(asked, pool.grade(items), strict=True):
                found[number] = verdict.error
    return found
