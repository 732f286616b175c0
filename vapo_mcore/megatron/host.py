"""Megatron-Core on a machine without CUDA.

Megatron-Core names CUDA in many places ("cuda" as a device string, ``torch.cuda.current_device()``, streams, typed
tensor names). :func:`megatron_scope` makes these mean the CPU while Megatron code runs and puts everything back on
exit, so that other libraries of the process (vLLM above all) never see a changed torch. Where CUDA exists the scope
does nothing at all. Every use of Megatron in this package happens inside the scope.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()


def compute_device() -> torch.device:
    """The device this process computes on: its current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else CPU


class HostPlatform:
    """The replacements, and which device stands for CUDA: the CPU, or ``meta`` to build models without memory."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """(owner, attribute, value) of everything that is replaced inside the scope."""
        import megatron.core.tensor_parallel.random as megatron_random

        def nothing(*_args: object, **_kwargs: object) -> None:
            return None

        def same(module_or_tensor: Any, *_args: object, **_kwargs: object) -> Any:
            return module_or_tensor

        def cuda_type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                return _TENSOR_TYPE(tensor, *args, **kwargs)
            name = _TENSOR_TYPE(tensor)
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)

        def get_state(*_args: object, **_kwargs: object) -> torch.Tensor:
            return torch.get_rng_state()

        def set_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
            torch.set_rng_state(state)

        cuda = torch.cuda
        return [
            (cuda, "current_device", lambda: self.device),
            (cuda, "synchronize", nothing),
            (cuda, "set_device", nothing),
            (cuda, "empty_cache", nothing),
            (cuda, "is_current_stream_capturing", lambda: False),
            (cuda, "Stream", _HostStream),
            (cuda, "current_stream", lambda *_: _HostStream()),
            (cuda, "default_stream", lambda *_: _HostStream()),
            (cuda, "stream", lambda _stream: contextlib.nullcontext()),
            (cuda, "get_rng_state", get_state),
            (cuda, "set_rng_state", set_state),
            (cuda, "manual_seed", torch.manual_seed),
            (cuda, "default_generators", (torch.default_generator,)),
            (torch.Tensor, "cuda", same),
            (torch.Tensor, "pin_memory", same),
            (torch.nn.Module, "cuda", same),
            (torch.Tensor, "type", cuda_type_name),
            (megatron_random, "_get_cuda_rng_state", get_state),
            (megatron_random, "_set_cuda_rng_state", set_state),
        ]


class _HostStream:
    """Stands for a CUDA stream and for its events: work on the CPU is done when the call returns, so there is nothing to order."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def wait_stream(self, *_args: object) -> None:
        pass

    def wait_event(self, *_args: object) -> None:
        pass

    def wait(self, *_args: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, *_args: object) -> _HostStream:
        return self


_TENSOR_TYPE = torch.Tensor.type


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaMeansHost(TorchFunctionMode):
    """Turns ``device="cuda"`` arguments of torch calls into the host platform's device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": self.device}
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], int) and _names_cuda(args[1]):
            args = (args[0], self.device, *args[2:])
        return func(*args, **kwargs)


_depth = 0


@contextlib.contextmanager
def megatron_scope(device: torch.device | None = None) -> Iterator[None]:
    """Run Megatron-Core code: on CUDA as it is, without CUDA with ``device`` (default: the CPU) in CUDA's place.

    Scopes nest; the outermost one installs and removes the replacements. ``device=torch.device("meta")`` builds models
    of any size without memory and is honoured with CUDA present too.
    """
    global _depth
    if (HAS_CUDA and device is None) or _depth > 0:
        yield
        return
    platform = HostPlatform(device or CPU)
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in platform.replacements()]
    _depth += 1
    try:
        for owner, name, value in platform.replacements():
            setattr(owner, name, value)
        with _CudaMeansHost(platform.device):
            yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        _depth -= 1


@contextlib.contextmanager
def counted_as_device(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Without CUDA, ``is_cuda`` says True for these tensors and all views of them, and False for everything else; with it nothing changes.

    Megatron's CPU-offloaded optimizer asks it while it is built, to tell the parameters of the device from its own copies in host memory.
    """
    if HAS_CUDA:
        yield
        return
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    torch.Tensor.is_cuda = property(lambda tensor: tensor.untyped_storage()._cdata in storages)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda  # that of the base class is seen again


def import_megatron() -> None:
    """Import Megatron-Core once, without its warnings about libraries that a CPU machine cannot have.

    Megatron decorates its fused functions with ``torch.compile`` when it is imported. Without CUDA that is left out: the
    compiler would trace through the replacements above, and on CPU the functions are not worth a compilation.
    """
    if "megatron.core" in sys.modules:
        return
    for module in ("megatron", "torch.distributed"):  # deprecations inside the libraries: nothing a user can act on
        warnings.filterwarnings("ignore", module=module + r"\b")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # Megatron's buffer offload uses it
    compile_function = torch.compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.WARNING)
        try:
            if not HAS_CUDA:
                importlib.import_module("torch._dynamo")  # it tables the functions of torch when imported: it must see the real ones

                torch.compile = _leave_uncompiled  # type: ignore[assignment]
            import megatron.core.jit
            import megatron.core.optimizer  # noqa: F401
            from megatron.core.transformer.moe import moe_utils

            if not hasattr(moe_utils, "te_general_gemm"):  # the router asks for it, defined or not (0.16.1)
                moe_utils.te_general_gemm = None
        finally:
            torch.compile = compile_function


def _leave_uncompiled(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated
