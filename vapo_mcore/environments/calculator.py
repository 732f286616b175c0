"""The ``calculator`` environment: replies to a turn that ends with ``<calc>expression</calc>`` with the expression's value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_mcore.environments.arithmetic import ArithmeticFault, evaluate, written
from vapo_mcore.environments.types import Observation

_CALL = re.compile(r"<calc>([^<>]*)</calc>\s*\Z")


def calculator(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> Observation | None:
    """Return the value of the call that ends the newest turn, or its error (``error: division by zero``); None without a call."""
    call = _CALL.search(turns[-1])
    if call is None:
        return None
    try:
        return Observation(written(evaluate(call[1])))
    except ArithmeticFault as fault:
        return Observation(f"error: {fault}")
