"""Verifiers for whole runs of a random model: verdicts that vary, that are all wrong, and that end the grading process."""

import os
from collections.abc import Mapping
from typing import Any

from vapo_mcore.rewards import StepReward, StepScores


def divisible_by_three(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    return float(sum(map(ord, response)) % 3 == 0)


def wrong(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    return 0.0


def sometimes_dies(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    if sum(map(ord, response)) % 5 == 0:
        os._exit(3)
    return divisible_by_three(response, ground_truth, metadata)


def every_fourth_character(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> StepScores:
    """A step ends after every fourth character, with the character's code as its reward."""
    steps = [StepReward(end, ord(response[end - 1]) / 100) for end in range(4, len(response) + 1, 4)]
    return StepScores(divisible_by_three(response, ground_truth, metadata), steps)
