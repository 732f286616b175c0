"""Check names of environments without importing them; the environments are in ``vapo_mcore.environments``."""

from __future__ import annotations

from vapo_mcore.config.references import FORM, is_reference, unknown_name

BUILT_IN_ENVIRONMENTS = {"calculator": "vapo_mcore.environments.calculator:calculator"}


def environment_name_fault(name: str) -> str | None:
    """Return an error message for a name that is neither built-in nor a reference to a function, else None."""
    if name in BUILT_IN_ENVIRONMENTS or is_reference(name):
        return None
    return unknown_name("environment", name, BUILT_IN_ENVIRONMENTS, f"name a custom one by a reference: {FORM}")


def environment_reference(name: str) -> str:
    """Return the reference of an environment's function."""
    return BUILT_IN_ENVIRONMENTS.get(name, name)
