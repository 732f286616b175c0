"""Check the form of references to custom code, without importing it; ``vapo_mcore.extensions`` imports it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

FORM = "'package.module:name' or 'path/to/file.py:name'"

_REFERENCE = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\0]*[^:\0/]\.py):[A-Za-z_]\w*")


def is_reference(text: str) -> bool:
    """Return whether ``text`` names an object in a module or in a Python file."""
    return _REFERENCE.fullmatch(text) is not None


def is_file_reference(text: str) -> bool:
    """Return whether a reference names a file rather than a module on Python's path."""
    return text.rpartition(":")[0].endswith(".py")


def reference_fault(text: str) -> str | None:
    """Return an error message if ``text`` does not have the form of a reference, else None."""
    return None if is_reference(text) else f"{text!r} must be a reference to custom code: {FORM}"


def unknown_name(kind: str, name: str, built_in: Iterable[str], custom: str) -> str:
    """Return the message about a name that is neither built-in nor a reference; ``custom`` explains how to name a custom one."""
    near = get_close_matches(name, list(built_in), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}built-in: {', '.join(built_in)}; {custom}"
