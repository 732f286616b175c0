"""The tutorial's reward (docs/tutorial.md): the right sum, with partial credit for a sum with one wrong digit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def nearly_right(response: str, ground_truth: str, metadata: Mapping[str, Any], *, credit: float = 0.2) -> float:
    """1 for the right number in the last box, ``credit`` if one digit of it is wrong, else 0."""
    boxes = re.findall(r"\\boxed\{(\d+)\}", response)
    if not boxes or len(boxes[-1]) != len(ground_truth):
        return 0.0
    wrong = sum(mine != right for mine, right in zip(boxes[-1], ground_truth, strict=True))
    return 1.0 if wrong == 0 else credit * (wrong == 1)
