"""References to a user's own code: their form, which can be checked without importing anything (``vapo_mcore.extensions`` imports)."""

from __future__ import annotations

import re

FORM = "'package.module:name' or 'path/to/file.py:name'"

_REFERENCE = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\0]*[^:\0/]\.py):[A-Za-z_]\w*")


def is_reference(text: str) -> bool:
    """Whether ``text`` names an object of a module or of a Python file."""
    return _REFERENCE.fullmatch(text) is not None


def is_file_reference(text: str) -> bool:
    """Whether a reference names a file rather than a module that Python finds on its path."""
    return text.rpartition(":")[0].endswith(".py")


def reference_fault(text: str) -> str | None:
    """What is wrong with the form of a reference; None if nothing is."""
    return None if is_reference(text) else f"{text!r} must be a reference to your own code: {FORM}"
