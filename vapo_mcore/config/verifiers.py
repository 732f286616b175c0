"""Names of verifiers: what the configuration can check of them without importing one (``vapo_mcore.rewards`` holds the verifiers)."""

from __future__ import annotations

import re
from difflib import get_close_matches

BUILT_IN_VERIFIERS = ("math", "math_last_number", "exact", "regex", "multiple_choice", "reasoning_gym")

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def verifier_name_fault(name: str) -> str | None:
    """What is wrong with a name that is neither built-in nor the import path of a function; None if nothing is."""
    if name in BUILT_IN_VERIFIERS or _IMPORT_PATH.fullmatch(name):
        return None
    near = get_close_matches(name, BUILT_IN_VERIFIERS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"unknown verifier {name!r}: {hint}built-in are {', '.join(BUILT_IN_VERIFIERS)}; "
        "your own is named by its import path, 'package.module:function'"
    )
