"""Configure PyTorch's CUDA allocator by environment variable. Does not import torch, which reads the variable on import."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with torch's allocator configuration; torch uses the first one that is set."""
EXPANDABLE = "expandable_segments:True"


def prepare_allocator(environment: MutableMapping[str, str]) -> None:
    """Enable ``expandable_segments``, unless the environment already configures the allocator.

    Micro-batches differ in length, so freed blocks rarely fit the next one: fixed segments fragment, expandable ones grow. vLLM (0.32)
    disables them around its memory pools.
    """
    if allocator_variable(environment) is None:
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def allocator_variable(environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that torch reads, None if none is set."""
    return next((name for name in ALLOCATOR_VARIABLES if environment.get(name)), None)


def is_expandable(configuration: str) -> bool:
    """Return whether ``configuration`` (KEY:VALUE,KEY:VALUE) enables expandable segments."""
    fields = (field.partition(":") for field in configuration.split(","))
    return any(name.strip() == "expandable_segments" and value.strip().lower() in ("true", "1") for name, _, value in fields)
