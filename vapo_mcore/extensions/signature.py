"""Inputs and options of a user's function, read from its signature: positional parameters are inputs, keyword-only ones are options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True)
class Signature:
    """Input names in order, option names, and the options without a default."""

    inputs: tuple[str, ...]
    options: tuple[str, ...]
    required: tuple[str, ...]


def read_signature(function: Callable[..., Any]) -> Signature:
    """Return the inputs and options of ``function``. Raises ValueError if it has ``*args``, ``**kwargs``, or no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"has no readable signature: {error}") from error
    starred = [parameter.name for parameter in parameters if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    if starred:
        raise ValueError(f"must name each input and option: *{starred[0]} accepts any")
    inputs = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    options = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return Signature(inputs, options, tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty))


def signature_faults(
    function: Callable[..., Any], available: Collection[str], options: Mapping[str, Any], unavailable: Mapping[str, str]
) -> list[str]:
    """Return the mismatches between a function's parameters, the available inputs, and the configured options.

    ``unavailable``: inputs that only other configurations provide, with the reason.
    """
    try:
        signature = read_signature(function)
    except ValueError as error:
        return [str(error)]
    faults = []
    for name in signature.inputs:
        if name in available:
            continue
        if name in unavailable:
            faults.append(f"asks for {name!r}, {unavailable[name]}")
            continue
        near = get_close_matches(name, available, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        faults.append(f"asks for {name!r}, which does not exist{hint} (inputs: {', '.join(available) or 'none'}; options are keyword-only)")
    for name in options:
        if name not in signature.options:
            known = f"its options are {', '.join(signature.options)}" if signature.options else "it has none"
            faults.append(f"has no option {name!r}: {known}")
    faults += [f"needs the option {name!r}" for name in signature.required if name not in options]
    return faults
