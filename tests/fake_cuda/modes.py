"""Every operator: whether its tensors may meet, in which order, and on which device its results are."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda import collectives, generators, memory, order
from tests.fake_cuda.faults import count_sync, fault
from tests.fake_cuda.memory import device_of, host_facts, memory_of, span_of, storage_of

CPU = torch.device("cpu")

SIZED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique", "repeat_interleave.Tensor", "argwhere")
"""Operators that wait for values to know the size of their result."""

HOST_TENSORS_TAKEN = (
    "aten.index.",
    "aten.index_put",
    "aten._index_put",
    "aten.masked_fill",
    "aten._foreach_mul",
    "aten.fill",
    "aten._foreach_add",
)
"""Operators besides element-wise ones that take host tensors: indices of advanced indexing, 0-dimensional values."""


class Kind:
    """What is to know of an operator, from its schema."""

    def __init__(self, func: Any) -> None:
        self.name = str(func)
        arguments = func._schema.arguments
        self.written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        self.positions = {argument.name: number for number, argument in enumerate(arguments)}
        returns = func._schema.returns
        self.is_view = not any(self.written) and any(item.alias_info is not None for item in returns)
        self.pointwise = torch.Tag.pointwise in func.tags
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_copy = self.name.startswith(("aten.copy_.", "aten._to_copy."))
        self.is_collective = self.name.startswith("c10d")
        self.waits = any(f".{name}" in self.name for name in SIZED_BY_VALUES)


kind_of = functools.cache(Kind)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in the arguments or results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)


HOST: Literal["host"] = "host"
_outer: list[int | Literal["host"] | None] = []
"""Of the running Python-level function of torch: the device of the tensors it was called with, or HOST where it was told ``device="cpu"``.
Operators inside it make tensors from "the options of" its tensors, which say cpu."""


@contextmanager
def inside(device: int | Literal["host"] | None) -> Iterator[None]:
    """Operators that make tensors from nothing make them there."""
    _outer.append(device)
    try:
        yield
    finally:
        _outer.pop()


class Functions(TorchFunctionMode):
    """Calls of torch as the program makes them: explicit devices and generators."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cuda", args[0])
        if func is torch.tensor:
            return _tensor(args, kwargs)
        if func is torch.as_tensor:
            if args and isinstance(args[0], Tensor):
                rest = {"dtype": kwargs.get("dtype", args[1] if len(args) > 1 else None), "device": kwargs.get("device")}
                return args[0].to(**{name: value for name, value in rest.items() if value is not None})
            return _tensor(args, kwargs)
        if isinstance(kwargs.get("device"), int):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        outer: Any = None
        if str(kwargs.get("device")) == "cpu":
            outer = HOST
        elif func not in _FACTORIES:
            outer = next((number for tensor in tensors_in((args, kwargs)) if (number := device_of(tensor)) is not None), None)
        generator = kwargs.get("generator")
        if generator is not None:
            generators.check_generator(generator, kwargs.get("device"), outer if isinstance(outer, int) else None)
        with inside(outer):
            return func(*args, **kwargs)


def _tensor(args: tuple, kwargs: dict) -> Tensor:
    device = kwargs.get("device")
    made = torch.tensor(*args, **{name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")})
    if kwargs.get("pin_memory"):
        host_facts(made).pinned = True
    return made if device is None else made.to(device)


_FACTORIES = {
    getattr(torch, name)
    for name in [
        "empty",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "randperm",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "empty_strided",
        "scalar_tensor",
        "from_numpy",
        "tril_indices",
    ]
}


class Operators(TorchDispatchMode):
    """Everything that computes, in forward and backward passes, whoever calls it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        kind = kind_of(func)
        tensors = [value for value in tensors_in((args, kwargs)) if not value.is_meta]
        if kind.is_collective:
            collectives.enter(kind.name, args, tensors)
            return func(*args, **kwargs)
        if (device := kwargs.get("device")) is not None and device.type == "meta":
            return func(*args, **kwargs)
        target = self._target(kwargs, tensors)
        pinned = bool(kwargs.get("pin_memory"))
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        on_device = [tensor for tensor in tensors if device_of(tensor) is not None]
        self._may_meet(kind, args, tensors, on_device)
        inputs = {id(storage) for tensor in tensors if (storage := storage_of(tensor)) is not None}
        if not kind.is_view:
            self._in_order(kind, args, kwargs, tensors, target)
            self._waits(kind, args, kwargs, on_device)
        if kind.is_random and target is not None and kwargs.get("generator") is None:
            with generators.default_of(target):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self._place(kind, out, inputs, target, pinned)
        return out

    def _target(self, kwargs: dict, tensors: list[Tensor]) -> int | None:
        """The device of the results; None: the host."""
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            kwargs["device"] = CPU
            return order.device_number(device)
        outer = _outer[-1] if _outer else None
        if outer == HOST:
            return None
        found = next((number for tensor in tensors if (number := device_of(tensor)) is not None), None)
        return outer if found is None and not tensors else found  # type: ignore[return-value]

    def _may_meet(self, kind: Kind, args: tuple, tensors: list[Tensor], on_device: list[Tensor]) -> None:
        if not on_device:
            return
        first = device_of(on_device[0])
        if any(device_of(tensor) != first for tensor in on_device):
            fault(f"{kind.name}: tensors on cuda:{first} and another CUDA device")
        if first != order.current_device() and not kind.is_view:
            fault(f"{kind.name}: a tensor on cuda:{first} while the current device is cuda:{order.current_device()}")
        host = [tensor for tensor in tensors if device_of(tensor) is None]
        if not host or kind.is_copy or kind.name.startswith(("aten.set_", "aten.lift_fresh", "aten.equal", "aten._has_compatible")):
            return
        if kind.name.startswith(("aten.index.", "aten.index_put", "aten._index_put")):  # self on the device; indices may be on the host
            indices = list(tensors_in(args[1]))
            values = list(tensors_in(args[2:]))
            if device_of(args[0]) is not None and all(device_of(value) is not None or value.dim() == 0 for value in values):
                if any(device_of(index) is None for index in indices):
                    count_sync("to_device")
                return
            fault(f"{kind.name}: CUDA and host tensors")
        scalars_fit = kind.pointwise or kind.name.startswith(HOST_TENSORS_TAKEN)
        wrong = [tensor for tensor in host if tensor.dim() > 0 or not scalars_fit]
        if wrong:
            fault(f"{kind.name}: CUDA {[tuple(x.shape) for x in on_device][:3]} with host {[tuple(x.shape) for x in wrong][:3]}")

    def _in_order(self, kind: Kind, args: tuple, kwargs: dict, tensors: list[Tensor], target: int | None) -> None:
        written: set[int] = set()
        for number, value in enumerate(args):
            if number < len(kind.written) and kind.written[number]:
                written |= {id(storage_of(tensor)) for tensor in tensors_in(value)}
        for name, value in kwargs.items():
            if name in kind.positions and kind.written[kind.positions[name]]:
                written |= {id(storage_of(tensor)) for tensor in tensors_in(value)}
        device = target if target is not None else next((d for x in tensors if (d := device_of(x)) is not None), None)
        if device is None:
            for tensor in tensors:
                if (facts := memory_of(tensor)) is not None:
                    facts.accesses.check(
                        order.HOST, writes=id(storage_of(tensor)) in written, what=f"{kind.name}: a host tensor {tuple(tensor.shape)}"
                    )
            return
        use_device(kind.name)
        stream = order.current_stream(device)
        mark = stream.enqueue()
        for tensor in tensors:
            storage = storage_of(tensor)
            facts = memory_of(tensor)
            if storage is None or tensor.numel() == 0:
                continue
            if facts is not None and facts.device is not None and storage.nbytes() == 0:
                fault(f"{kind.name}: the memory of a tensor {tuple(tensor.shape)} has been released")
            writes = id(storage) in written
            if facts is None or facts.device is None:
                if not kind.is_copy:
                    if facts is not None:
                        facts.accesses.check(order.HOST, writes=writes, what=f"{kind.name}: a host tensor {tuple(tensor.shape)}")
                    continue
                if not writes and not is_page_locked(tensor):  # staged by the driver before the call returns
                    if facts is not None:
                        facts.accesses.check(order.HOST, writes=False, what=f"{kind.name}: a host tensor {tuple(tensor.shape)}")
                    continue
                facts = host_facts(tensor)
            span = span_of(tensor)
            facts.accesses.check(stream.clock, writes=writes, what=f"{kind.name}: a tensor {tuple(tensor.shape)}", span=span)
            facts.accesses.add(mark, writes=writes, span=span)

    def _waits(self, kind: Kind, args: tuple, kwargs: dict, on_device: list[Tensor]) -> None:
        """Count what the host waits for, and note that it then knows the stream to be complete."""
        if not on_device or collectives.running():  # gloo copies to and fro, NCCL does not
            return
        waited = None
        if kind.name.startswith("aten._local_scalar_dense") or kind.name.startswith(("aten.equal", "aten.is_nonzero")):
            waited = "item"
        elif (kind.waits and kwargs.get("output_size") is None) or _indexes_by_mask(kind, args):
            waited = "shape"
        elif (
            kind.name.startswith("aten.copy_.") and len(on_device) == 1 and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        ):
            waited = "to_device" if device_of(args[0]) is not None else "to_host"
        if waited:
            count_sync(waited)
            order.merge(order.HOST, order.current_stream().clock)

    def _place(self, kind: Kind, out: Any, inputs: set[int], target: int | None, pinned: bool) -> None:
        for tensor in tensors_in(out):
            if tensor.is_meta or (storage := storage_of(tensor)) is None or id(storage) in inputs:
                continue
            if target is not None:
                use_device(kind.name)
                stream = order.current_stream(target)
                memory.put(tensor, target, stream)
                facts = memory_of(tensor)
                assert facts is not None
                facts.accesses.add((stream.id, stream.clock[stream.id]), writes=True)
            elif pinned or (kind.name.startswith("aten.empty") and storage.nbytes()):
                facts = host_facts(tensor)
                facts.pinned = facts.pinned or pinned


def _indexes_by_mask(kind: Kind, args: tuple) -> bool:
    """Whether indices are made from a mask, whose number of true entries the host must know; one value is filled in without it."""
    if not kind.name.startswith(("aten.index.", "aten.index_put")):
        return False
    if "index_put" in kind.name and args[2].numel() == 1:
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


def is_page_locked(tensor: Tensor) -> bool:
    facts = memory_of(tensor)
    return facts is not None and facts.device is None and (facts.pinned or facts.registered)


class _Process:
    """Whether and where the device was first used."""

    pid: int | None = None
    error: int = 0


def use_device(what: str) -> None:
    """Every piece of device work: raises in a forked child, and what an earlier failed call has left."""
    if _Process.pid is None:
        _Process.pid = os.getpid()
    elif _Process.pid != os.getpid():
        fault(f"{what}: CUDA cannot be used in a forked child of a process that has used it")
    if _Process.error:
        code, _Process.error = _Process.error, 0
        fault(f"{what}: raises CUDA error {code}, which an earlier call left and nobody fetched (cudaGetLastError)")


def leave_error(code: int) -> None:
    _Process.error = code


def fetch_error() -> int:
    code, _Process.error = _Process.error, 0
    return code


def is_initialized() -> bool:
    return _Process.pid is not None


__all__ = ["Functions", "Operators", "fetch_error", "is_initialized", "is_page_locked", "leave_error", "use_device"]
