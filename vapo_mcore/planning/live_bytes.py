"""Track the bytes of live tensor storages and their peak while code runs, on one device type (``meta`` or a real one)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts every storage returned by an operator, once, until it is freed.

    Ignores storages of ``ignored`` tensors (parameters, gradient buffers). Temporary allocations inside operators are not visible, except
    with ``on_cpu``, where the peak includes two of them: pointwise operators copy operands that do not have the common dtype, and gloo's
    reduce-scatter copies its inputs (NCCL's does not). ``track`` counts an existing tensor.
    """

    def __init__(self, device_type: str, ignored: Iterable[Tensor] = (), *, on_cpu: bool = False) -> None:
        super().__init__()
        self.device_type, self.on_cpu = device_type, on_cpu
        self.current = self.peak = 0
        self._known: dict[int, Any] = {}
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}

    def reset_peak(self) -> None:
        self.peak = self.current

    def track(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == self.device_type:
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if key not in self._known and key not in self._ignored:
                self._known[key] = weakref.ref(storage, self._forget(key, num_bytes))
                self.current += num_bytes
                self.peak = max(self.peak, self.current)
        return tensor

    def _forget(self, key: int, num_bytes: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.current -= num_bytes

        return gone

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        if self.on_cpu and torch.Tag.pointwise in func.tags:
            self.peak = max(self.peak, self.current + _cast_bytes(args))
        if self.on_cpu and func.name() in _REDUCE_SCATTERS:
            self.peak = max(self.peak, self.current + _num_bytes(args[1]))
        return result


_REDUCE_SCATTERS = ("c10d::reduce_scatter_", "c10d::_reduce_scatter_base_")  # arguments: outputs, inputs, ...


def _num_bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def _cast_bytes(args: tuple) -> int:
    """Return the bytes of the operands' copies in their common dtype."""
    operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 0]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    common = reduce(torch.promote_types, (operand.dtype for operand in operands))
    return sum(operand.numel() * common.itemsize for operand in operands if operand.dtype != common)
