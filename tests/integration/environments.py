"""Environments for whole runs of a random model."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_mcore.environments import Observation


def letters(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> Observation | None:
    """Answers each turn with its number and length; a reward of 0.25 for turns of even length; over where a turn holds a Q."""
    if "Q" in turns[-1]:
        return Observation(None, -0.5)
    return Observation(f"[{len(turns)}:{len(turns[-1])}]", 0.25 if len(turns[-1]) % 2 == 0 else 0.0)


def sometimes_dies(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> Observation | None:
    if sum(map(ord, turns[0])) % 3 == 0:
        os._exit(3)
    return letters(turns, ground_truth, metadata)


def wrong_type(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> str:
    return "text"
