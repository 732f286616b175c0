"""How PyTorch's CUDA allocator is configured in a process of a run. Imports no torch: torch reads the variable when it is imported."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch reads the configuration from, the first that is set."""
EXPANDABLE = "expandable_segments:True"


def prepare_allocator(environment: MutableMapping[str, str]) -> None:
    """Switch ``expandable_segments`` on, unless the environment configures the allocator itself.

    Micro-batches differ in length, so that freed blocks seldom fit the next one: fixed segments fragment, and expandable ones grow. vLLM
    (0.32) switches them off around its own memory pools.
    """
    if allocator_variable(environment) is None:
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def allocator_variable(environment: Mapping[str, str]) -> str | None:
    """The variable that torch takes its configuration from, None where there is none."""
    return next((name for name in ALLOCATOR_VARIABLES if environment.get(name)), None)


def is_expandable(configuration: str) -> bool:
    """Whether ``configuration`` (KEY:VALUE,KEY:VALUE) switches expandable segments on."""
    fields = (field.partition(":") for field in configuration.split(","))
    return any(name.strip() == "expandable_segments" and value.strip().lower() in ("true", "1") for name, _, value in fields)
