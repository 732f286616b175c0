"""Run Megatron-Core on machines without CUDA.

Megatron-Core refers to CUDA in many places (the device string "cuda", ``torch.cuda.current_device()``, streams, tensor type
names). :func:`megatron_scope` redirects these to the CPU while Megatron code runs and restores them on exit, so that other libraries in
the process, such as vLLM, never see a patched torch. With CUDA the scope does nothing. All Megatron code of this package runs inside
the scope.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
HAS_CUDA = torch.cuda.is_available()


def compute_device() -> torch.device:
    """Return the device this process computes on: its current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else CPU


class HostPlatform:
    """Replacements for CUDA functions, with ``device`` in place of CUDA: the CPU, or ``meta`` to build models without memory."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """Return (owner, attribute, value) for everything replaced inside the scope."""
        import megatron.core.tensor_parallel.random as megatron_random
        from megatron.core.transformer.moe import token_dispatcher

        def nothing() -> Callable[..., None]:
            """Return a new function for each use: torch.compile refuses one object under two names of torch."""
            return lambda *_args, **_kwargs: None

        def same(module_or_tensor: Any, *_args: object, **_kwargs: object) -> Any:
            return module_or_tensor

        def cuda_type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                return _TENSOR_TYPE(tensor, *args, **kwargs)
            name = _TENSOR_TYPE(tensor)
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)

        def on_host(tensor: Any, as_numpy: bool = False, **_kwargs: object) -> Any:
            """``maybe_move_tensor_to_cpu``, which returns a tensor on the CPU as it is: the exchange of tokens needs numbers."""
            return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

        def get_state(*_args: object, **_kwargs: object) -> torch.Tensor:
            return torch.get_rng_state()

        def set_state(state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
            torch.set_rng_state(state)

        cuda = torch.cuda
        return [
            (cuda, "current_device", lambda: self.device),
            (cuda, "synchronize", nothing()),
            (cuda, "set_device", nothing()),
            (cuda, "empty_cache", nothing()),
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
            (torch.distributed, "all_gather", _all_gather),
            (torch.distributed, "reduce_scatter", _reduce_scatter),
            (token_dispatcher, "maybe_move_tensor_to_cpu", on_host),
            (megatron_random, "_get_cuda_rng_state", get_state),
            (megatron_random, "_set_cuda_rng_state", set_state),
        ]


_EQUAL_GATHER, _EQUAL_SCATTER = torch.distributed.all_gather, torch.distributed.reduce_scatter


def _all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Run ``all_gather`` on tensors of different sizes, which gloo does not support: every rank sends its tensor to each of the others."""
    sizes = [len(part) for part in tensors]
    if len(set(sizes)) == 1:
        return _EQUAL_GATHER(tensors, tensor, group=group, async_op=async_op)
    received = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
    torch.distributed.all_to_all_single(received, torch.cat([tensor] * len(sizes)), sizes, [len(tensor)] * len(sizes), group)
    for part, values in zip(tensors, received.split(sizes), strict=True):
        part.copy_(values)
    return None


def _reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], *, group: Any = None) -> Any:
    """Run ``reduce_scatter`` (sum) on parts of different sizes: every rank sends each other rank its part and sums what it receives."""
    sizes = [len(part) for part in parts]
    if len(set(sizes)) == 1:
        return _EQUAL_SCATTER(output, parts, group=group)
    received = output.new_empty((len(sizes), *output.shape))
    torch.distributed.all_to_all_single(received.flatten(0, 1), torch.cat(parts), [len(output)] * len(sizes), sizes, group)
    torch.sum(received, 0, out=output)
    return None


class _HostStream:
    """Replaces CUDA streams and events with no-ops; CPU work is synchronous."""

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
    """Replaces ``device="cuda"`` arguments of torch calls by the host platform's device."""

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
    """Run Megatron-Core code: unchanged with CUDA, with ``device`` (default: the CPU) in place of CUDA without it.

    Scopes nest; the outermost one installs and removes the replacements. ``device=torch.device("meta")`` builds models
    of any size without memory, also on machines with CUDA.
    """
    global _depth
    if (HAS_CUDA and device is None) or _depth > 0:
        yield
        return
    platform = HostPlatform(device or CPU)
    _depth += 1
    try:
        with replaced(platform.replacements()), _CudaMeansHost(platform.device):
            yield
    finally:
        _depth -= 1


@contextlib.contextmanager
def replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set each (owner, attribute, value) and restore the attributes on exit."""
    before = []
    try:
        for owner, name, value in replacements:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


@contextlib.contextmanager
def counted_as_device(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Make ``is_cuda`` True for these tensors and their views and False for all others; does nothing if CUDA is available.

    Megatron's CPU-offloaded optimizer reads it while it is built, to distinguish device parameters from its copies in host memory.
    """
    if HAS_CUDA:
        yield
        return
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    torch.Tensor.is_cuda = property(lambda tensor: tensor.untyped_storage()._cdata in storages)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda  # uncovers the attribute of the base class


def import_megatron() -> None:
    """Import Megatron-Core once, suppressing its warnings about libraries that a CPU machine cannot have.

    Megatron decorates its fused functions with ``torch.compile`` on import. Without CUDA this is disabled: the compiler would trace
    through the replacements above, and on CPU compiling these functions does not pay off.
    """
    if "megatron.core" in sys.modules:
        return
    for module in ("megatron", "torch.distributed"):  # deprecations inside the libraries, which users cannot act on
        warnings.filterwarnings("ignore", module=module + r"\b")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # Megatron's buffer offload uses it
    compile_function = torch.compile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.WARNING)
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found", of torch's CUDA build
        try:
            if not HAS_CUDA:
                importlib.import_module("torch._dynamo")  # records torch's functions on import; must see the original ones

                torch.compile = _leave_uncompiled  # type: ignore[assignment]
            with _not_importable("wandb"):  # a fifth of this import's time, for Megatron's own timers and inference logs
                import megatron.core.jit
                import megatron.core.optimizer  # noqa: F401
                from megatron.core.transformer.moe import moe_utils

            if not hasattr(moe_utils, "te_general_gemm"):  # the router reads it even if it is undefined (0.16.1)
                moe_utils.te_general_gemm = None
        finally:
            torch.compile = compile_function


@contextlib.contextmanager
def _not_importable(name: str) -> Iterator[None]:
    """Let optional imports of a package that is not yet imported fail inside the block."""
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


def _leave_uncompiled(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated
