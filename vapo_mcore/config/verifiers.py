"""Check names of verifiers without importing them; the verifiers are in ``vapo_mcore.rewards``."""

from __future__ import annotations

import re
from typing import Literal

from vapo_mcore.config.references import FORM, is_reference, unknown_name

BUILT_IN_VERIFIERS = (
    "math",
    "math_last_number",
    "math_answer_line",
    "math_steps",
    "exact",
    "regex",
    "multiple_choice",
    "reasoning_gym",
    "code",
)

MATH_VERIFIERS = ("math", "math_last_number", "math_answer_line", "math_steps")

Cause = Literal["ground_truth", "timeout", "crash", "verifier", "environment"]
UNGRADED: dict[Cause, str] = {
    "ground_truth": "the ground truth cannot be judged against",
    "timeout": "grading took longer than `reward.timeout_seconds`",
    "crash": "grading ended its process",
    "verifier": "the verifier raised, or returned no score in its range",
    "environment": "the environment failed",
}
"""Reasons why a response can have no verdict, by name."""

_ENDPOINT = re.compile(r"https?://[^\s/?#@]+(?:[/?]\S*)?")


def is_endpoint(name: str) -> bool:
    """Return whether a verifier is an HTTP endpoint, named by its URL."""
    return _ENDPOINT.fullmatch(name) is not None


def verifier_name_fault(name: str) -> str | None:
    """Return an error message for a name that is neither built-in nor a URL nor a reference to a function, else None."""
    if name in BUILT_IN_VERIFIERS or is_endpoint(name) or is_reference(name):
        return None
    custom = f"name a custom one by a reference: {FORM}, or by the URL of its endpoint: 'http://host:port/path'"
    return unknown_name("verifier", name, BUILT_IN_VERIFIERS, custom)
