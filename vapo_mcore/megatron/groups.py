"""Megatron-Core's global process groups, kept per layout: policy and critic may have different ones over the same ranks.

``megatron.core.parallel_state`` holds the groups and ranks of one layout in module variables, and many of its layers, schedules and
optimizers read them there instead of taking them as arguments. ``MegatronGroups`` keeps the variables of one layout and puts them in place
while a model of that layout runs. As long as a process has one layout, it stays in place all the time. With a second one nothing is in
place between the scopes, so that code outside them fails instead of reading the other role's layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_VARIABLE = re.compile(r"_[A-Z][A-Z0-9_]*|_global_process_group_list")
_SHARED = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
"""Scratch memory of gathers: models of both layouts take turns, so one is enough for both."""


def _state() -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    return {name: value for name, value in vars(ps).items() if _VARIABLE.fullmatch(name) and name not in _SHARED}


def _put(variables: Mapping[str, Any]) -> None:
    from megatron.core import parallel_state as ps

    for name, value in variables.items():
        setattr(ps, name, value)


class MegatronGroups:
    """Process groups, sizes and ranks of one layout, as Megatron's global state holds them."""

    def __init__(self) -> None:
        """Keep the layout that is in place."""
        self._variables = _state()

    @property
    def in_place(self) -> bool:
        """Return whether Megatron's global state is this layout's."""
        from megatron.core import parallel_state as ps

        return ps._MODEL_PARALLEL_GROUP is self._variables["_MODEL_PARALLEL_GROUP"]

    @contextmanager
    def put_in_place(self) -> Iterator[None]:
        """Make this layout the one that Megatron reads; on exit, what was there before is back."""
        if self.in_place:
            yield
            return
        before = _state()
        _put(self._variables)
        try:
            yield
        finally:
            _put(before)


@contextmanager
def second_layout() -> Iterator[None]:
    """Create another layout in this block. The block starts without one; after it none is in place outside the scopes of models."""
    from megatron.core import parallel_state as ps

    shared = {name: getattr(ps, name) for name in _SHARED}
    _put({name: {} if isinstance(value, dict) else None for name, value in _state().items()} | dict.fromkeys(_SHARED))
    nothing = _state()
    try:
        yield
    finally:
        _put(nothing | shared)
