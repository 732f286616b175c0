"""Random generators of the device: their own state, in a form that the host's generators do not take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.fake_cuda import order
from tests.fake_cuda.faults import fault

_Real = torch.Generator
_TAG = torch.tensor(list(b"fakecuda"), dtype=torch.uint8)
"""Ends a device generator's state."""


class _AnyGenerator(type(_Real)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(_Real, instance)


class Generator(_Real, metaclass=_AnyGenerator):
    """``torch.Generator``; on the device it draws what the host's draws from the same seed, so that numbers can be compared."""

    _number: int | None

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made._number = order.device_number(device) if order.names_cuda(device) else None
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self._number is None else torch.device("cuda", self._number)

    def get_state(self) -> torch.Tensor:
        state = _GET(self)
        return state if self._number is None else torch.cat([state, _TAG])

    def set_state(self, state: torch.Tensor) -> Generator:
        if self._number is not None:
            if state.shape[0] <= 8 or not torch.equal(state[-8:], _TAG):
                fault("the random state of a host generator is set on a CUDA generator")
            state = state[:-8].clone()
        _SET(self, state)
        return self


_GET, _SET = _Real.get_state, _Real.set_state
_defaults: dict[int, Generator] = {}


def default(number: int) -> Generator:
    """The generator that operators of a device draw from."""
    if number not in _defaults:
        _defaults[number] = Generator(torch.device("cuda", number))
        _defaults[number].manual_seed(torch.initial_seed())
    return _defaults[number]


@contextmanager
def default_of(number: int) -> Iterator[None]:
    """Draw from the device's default generator where an operator, run on the host, would draw from the host's."""
    generator, before = default(number), torch.default_generator.get_state()
    torch.default_generator.set_state(_GET(generator))
    try:
        yield
    finally:
        _SET(generator, torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def check_generator(generator: Any, device: Any, tensors: int | None) -> None:
    """FakeCudaError where a generator is not on the device of what is drawn: an explicit one, else that of the tensors given."""
    wanted = tensors
    if device is not None:
        wanted = order.device_number(device) if order.names_cuda(device) else None
    own = generator._number if isinstance(generator, Generator) and type(generator) is Generator else None
    if own != wanted:
        fault(f"a generator on {generator.device} for a tensor on {'cpu' if wanted is None else f'cuda:{wanted}'}")
