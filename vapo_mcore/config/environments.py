"""Names of environments: what the configuration can check of them without importing one (``vapo_mcore.environments`` holds them)."""

from __future__ import annotations

from difflib import get_close_matches

from vapo_mcore.config.references import FORM, is_reference

BUILT_IN_ENVIRONMENTS = {"calculator": "vapo_mcore.environments.calculator:calculator"}


def environment_name_fault(name: str) -> str | None:
    """What is wrong with a name that is neither built-in nor a reference to a function; None if nothing is."""
    if name in BUILT_IN_ENVIRONMENTS or is_reference(name):
        return None
    near = get_close_matches(name, BUILT_IN_ENVIRONMENTS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    built_in = ", ".join(BUILT_IN_ENVIRONMENTS)
    return f"unknown environment {name!r}: {hint}built-in: {built_in}; your own is named by a reference: {FORM}"


def environment_reference(name: str) -> str:
    """The reference of an environment's function."""
    return BUILT_IN_ENVIRONMENTS.get(name, name)
