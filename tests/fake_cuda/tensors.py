"""Methods of tensors that tell or change the device, as attributes of ``torch.Tensor``: in force everywhere, in threads too."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda import modes, order
from tests.fake_cuda.memory import Memory, device_of, host_facts, memory_of

_REAL = {
    name: getattr(Tensor, name)
    for name in [
        "device",
        "is_cuda",
        "get_device",
        "to",
        "type",
        "numpy",
        "tolist",
        "pin_memory",
        "is_pinned",
        "record_stream",
        "new_tensor",
        "__array__",
        "data_ptr",
    ]
}
_RESIZE, _CLONE = torch.UntypedStorage.resize_, torch.UntypedStorage.clone


def _device(self: Tensor) -> torch.device:
    number = device_of(self)
    return _REAL["device"].__get__(self) if number is None else torch.device("cuda", number)


def move(tensor: Tensor, target: int | None, dtype: torch.dtype | None, *, non_blocking: bool, memory_format: Any = None) -> Tensor:
    """A copy on another device."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Move.apply(tensor, target, dtype, non_blocking)  # type: ignore[no-any-return]
    tensor = tensor.detach()
    options = {} if memory_format is None else {"memory_format": memory_format}
    if target is not None:
        destination = torch.empty_like(tensor, dtype=dtype, device=torch.device("cuda", target), **options)
    else:
        destination = torch.empty_like(tensor, dtype=dtype, device=modes.CPU, pin_memory=non_blocking, **options)
    return destination.copy_(tensor, non_blocking=non_blocking)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: int | None, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        ctx.source = device_of(tensor), tensor.dtype
        return move(tensor.detach(), target, dtype, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        device, dtype = ctx.source
        return move(gradient, device, dtype, non_blocking=False), None, None, None


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, dtype, non_blocking, copy, memory_format = _parse_to(self, args, kwargs)
    if (device is not None and device.type == "meta") or self.is_meta:
        return _REAL["to"](self, *args, **kwargs)
    target = device_of(self)
    if device is not None:
        target = order.device_number(device) if device.type == "cuda" else None
    if target != device_of(self):
        return move(self, target, dtype or self.dtype, non_blocking=non_blocking, memory_format=memory_format)
    options = {} if memory_format is None else {"memory_format": memory_format}
    return _REAL["to"](self, dtype or self.dtype, copy=copy, **options)


def _parse_to(self: Tensor, args: tuple, kwargs: dict) -> tuple[torch.device | None, torch.dtype | None, bool, bool, Any]:
    """The forms of ``Tensor.to``: (device, dtype, ...), (dtype, ...), (other, ...)."""
    rest, kwargs = list(args), dict(kwargs)
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if "other" in kwargs:
        rest.insert(0, kwargs["other"])
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, dtype = other.device, other.dtype
    elif rest and isinstance(rest[0], torch.dtype):
        dtype = rest.pop(0)
    elif rest:
        device = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype = rest.pop(0)
    if isinstance(device, int):
        device = torch.device("cuda", device)
    non_blocking = bool(rest.pop(0)) if rest else bool(kwargs.get("non_blocking", False))
    copy = bool(rest.pop(0)) if rest else bool(kwargs.get("copy", False))
    return None if device is None else torch.device(device), dtype, non_blocking, copy, kwargs.get("memory_format")


def _cuda(self: Tensor, device: Any = None, non_blocking: bool = False, **_: object) -> Tensor:
    return _to(self, torch.device("cuda", order.device_number(device)), non_blocking=non_blocking)


def _type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not args and not kwargs and device_of(self) is not None:
        name = str(_REAL["type"](self))  # comes here again from within where a function mode is on
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
    if args and isinstance(args[0], str) and args[0].startswith("torch.cuda."):
        return _to(self, "cuda").type(args[0].replace("torch.cuda.", "torch."))
    return _REAL["type"](self, *args, **kwargs)


def _needs_host(name: str) -> Any:
    real = _REAL[name]

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if device_of(self) is not None:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if not (name == "numpy" and _called_by("maybe_move_tensor_to_cpu")):
            _check_host(self, name)
        return real(self, *args, **kwargs)

    return method


def _called_by(function: str) -> bool:
    """Whether a function of this name has called this module.

    ``maybe_move_tensor_to_cpu`` of Megatron-Core's token dispatcher takes an array of a copy that is under way; it reads the array after it
    has waited for the stream.
    """
    frame = sys._getframe(2)
    for _ in range(8):
        if frame.f_code.co_name == function:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _check_host(tensor: Tensor, what: str) -> None:
    if (facts := memory_of(tensor)) is not None:
        facts.accesses.check(order.HOST, writes=False, what=f"{what}: a host tensor {tuple(tensor.shape)}")


def _tolist(self: Tensor) -> Any:
    if device_of(self) is not None:
        return _REAL["tolist"](_to(self, "cpu"))
    _check_host(self, "tolist")
    return _REAL["tolist"](self)


def _pin_memory(self: Tensor, *_: object) -> Tensor:
    if device_of(self) is not None:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    made = self.detach().clone()
    host_facts(made).pinned = True
    return made


def _record_stream(self: Tensor, stream: Any) -> None:
    facts = memory_of(self)
    assert facts is not None and facts.device is not None, "record_stream is for device tensors"
    facts.recorded.add(stream.id)


def _new_tensor(self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad)


def _resize_storage(self: Any, size: int) -> Any:
    if (facts := getattr(self, "fake_cuda", None)) is not None and facts.device is not None:
        modes.use_device("resize_")
        result = _RESIZE(self, size)
        facts.resize(size)
        stream = order.current_stream(facts.device)
        facts.stream = stream
        return result
    return _RESIZE(self, size)


def _clone_storage(self: Any) -> Any:
    made = _CLONE(self)
    facts = getattr(self, "fake_cuda", None)
    if facts is not None and facts.device is not None:
        made.fake_cuda = Memory(facts.device, made.nbytes(), order.current_stream(facts.device))
    return made


def install() -> None:
    replacements: dict[str, Any] = {
        "device": property(_device),
        "is_cuda": property(lambda self: device_of(self) is not None),
        "get_device": lambda self: -1 if (number := device_of(self)) is None else number,
        "to": _to,
        "cuda": _cuda,
        "cpu": lambda self, memory_format=torch.preserve_format: _to(self, "cpu"),
        "type": _type,
        "numpy": _needs_host("numpy"),
        "__array__": _needs_host("__array__"),
        "tolist": _tolist,
        "pin_memory": _pin_memory,
        "is_pinned": lambda self, *_: modes.is_page_locked(self),
        "record_stream": _record_stream,
        "new_tensor": _new_tensor,
    }
    for name, value in replacements.items():
        setattr(Tensor, name, value)
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign]
    torch.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]


__all__ = ["install", "move"]
