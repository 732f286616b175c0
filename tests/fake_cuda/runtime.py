"""``torch.cuda`` and ``torch.accelerator`` of the fake device, and its installation."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from tests.fake_cuda import collectives, generators, memory, modes, order, tensors

ERROR_ALREADY_REGISTERED, ERROR_NOT_REGISTERED, ERROR_OUT_OF_MEMORY = 712, 713, 2


class _ErrorCode(int):
    """``cudart().cudaError``: made from a code."""

    success = 0


class Cudart:
    """``torch.cuda.cudart()``. A failed call leaves its error for ``cudaGetLastError`` or, if nobody asks, the next kernel.

    As PyTorch's binding, it has no function that clears the error; that one is in the process's global scope (:class:`_Library`).
    """

    cudaError = _ErrorCode
    registered: dict[int, int] = {}  # noqa: RUF012
    page_lockable_bytes = sys.maxsize
    """``ulimit -l``: what may be page-locked in all."""

    def _fail(self, code: int) -> int:
        modes.leave_error(code)
        return code

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        del flags
        modes.use_device("cudaHostRegister")
        if any(address < start + length and start < address + size for start, length in self.registered.items()):
            return self._fail(ERROR_ALREADY_REGISTERED)
        if sum(self.registered.values()) + size > Cudart.page_lockable_bytes:
            return self._fail(ERROR_OUT_OF_MEMORY)
        self.registered[address] = size
        if (facts := memory.HOST_MEMORY.get(address)) is not None:
            facts.registered = True
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.registered.pop(address, None) is None:
            return self._fail(ERROR_NOT_REGISTERED)
        if (facts := memory.HOST_MEMORY.get(address)) is not None:
            if not facts.accesses.settled(order.HOST):
                modes.fault("cudaHostUnregister: an asynchronous copy may still use the memory")
            facts.registered = False
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"fake CUDA error {code}"

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


class _Library(ctypes.CDLL):
    """``ctypes.CDLL``, where the process itself (no name) has the CUDA runtime's functions, as with a CUDA build of torch."""

    def __init__(self, name: str | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(name, *args, **kwargs)
        if name is None:
            self.cudaGetLastError = modes.fetch_error


def _of(device: Any) -> memory.Counters:
    return memory.counters(order.device_number(device))


def _empty_cache() -> None:
    for one in memory.COUNTERS.values():
        one.reserved = one.allocated


def _reset_peak(device: Any = None) -> None:
    one = _of(device)
    one.peak, one.reserved_peak = one.allocated, one.reserved


def _properties(device: Any = None) -> SimpleNamespace:
    del device
    return SimpleNamespace(
        name="Fake CUDA device", total_memory=memory.TOTAL_BYTES, major=9, minor=0, multi_processor_count=132, uuid="fake", gcnArchName=""
    )


def _device_count() -> int:
    return int(os.environ.get("FAKE_CUDA_DEVICES", os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Defaults(Sequence[generators.Generator]):
    """``torch.cuda.default_generators``: one a device."""

    def __getitem__(self, number: Any) -> Any:
        return generators.default(range(_device_count())[number])

    def __len__(self) -> int:
        return _device_count()


def _seed(seed: int) -> None:
    generators.default(order.current_device()).manual_seed(seed)


def _seed_all(seed: int) -> None:
    for generator in _Defaults():
        generator.manual_seed(seed)


def _nothing(*_: object, **__: object) -> None:
    return None


class _Device:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.number = order.device_number(device)

    def __enter__(self) -> None:
        order._device.append(self.number)

    def __exit__(self, *_: object) -> None:
        order._device.pop()


def _functions() -> dict[str, Any]:
    get: Any = lambda device="cuda": generators.default(order.device_number(device)).get_state()  # noqa: E731
    put: Any = lambda state, device="cuda": generators.default(order.device_number(device)).set_state(state)  # noqa: E731
    cudart = Cudart()
    return {
        "is_available": lambda: True,
        "is_initialized": modes.is_initialized,
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda function, **_: function(),
        "device_count": _device_count,
        "current_device": order.current_device,
        "set_device": order.set_device,
        "device": _Device,
        "synchronize": order.synchronize,
        "empty_cache": _empty_cache,
        "ipc_collect": _nothing,
        "Stream": order.Stream,
        "Event": order.Event,
        "stream": order.use_stream,
        "current_stream": order.current_stream,
        "default_stream": order.default_stream,
        "is_current_stream_capturing": lambda: False,
        "default_generators": _Defaults(),
        "get_rng_state": get,
        "set_rng_state": put,
        "get_rng_state_all": lambda: [get(number) for number in range(_device_count())],
        "set_rng_state_all": lambda states: [put(state, number) for number, state in enumerate(states)],
        "manual_seed": _seed,
        "manual_seed_all": _seed_all,
        "initial_seed": lambda: generators.default(order.current_device()).initial_seed(),
        "memory_allocated": lambda device=None: _of(device).allocated,
        "max_memory_allocated": lambda device=None: _of(device).peak,
        "memory_reserved": lambda device=None: _of(device).reserved,
        "max_memory_reserved": lambda device=None: _of(device).reserved_peak,
        "reset_peak_memory_stats": _reset_peak,
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": _of(device).allocated,
            "allocated_bytes.all.peak": _of(device).peak,
        },
        "mem_get_info": lambda device=None: (memory.TOTAL_BYTES - _of(device).reserved, memory.TOTAL_BYTES),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "Fake CUDA device",
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *_, **__: True,
        "cudart": lambda: cudart,
    }


class _Engine:
    """The autograd engine; what Python code of a backward pass calls goes through the modes as in a forward pass."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        roots = kwargs["tensors"] if "tensors" in kwargs else args[0]
        on_device = any(memory.device_of(tensor) is not None for tensor in roots if isinstance(tensor, torch.Tensor))
        active = torch._C._len_torch_function_stack() > 0  # not where torch itself has called us, from Tensor.backward
        with nullcontext() if active else modes.Functions(), modes.inside(order.current_device() if on_device else None):
            return self._real.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def install(*, transformer_engine: bool = False) -> None:
    """Make this process one of a machine with fake CUDA devices: ``LOCAL_WORLD_SIZE`` of them, or ``FAKE_CUDA_DEVICES``.

    Cannot be undone; a second call does nothing. Raises RuntimeError if something that asks for CUDA at import is imported already.
    ``transformer_engine``: leave it importable, for ``tests/te_reference``, which replaces its kernels.
    """
    if torch.Generator is generators.Generator:
        return
    early = sorted(name for name in sys.modules if name in ("megatron.core", "vapo_mcore.megatron.host", "transformer_engine", "vllm"))
    if early:
        raise RuntimeError(f"install the fake CUDA device before {', '.join(early)} is imported")
    for library in (*(() if transformer_engine else ("transformer_engine",)), "flashinfer", "vllm"):  # they would call kernels
        sys.modules[library] = None  # type: ignore[assignment]
    for module in (
        "torch._dynamo",
        "torch.distributed.checkpoint",
    ):  # they table the functions of torch when imported: they must see the real ones
        importlib.import_module(module)
    functions = _functions()
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
        for inner in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if hasattr(inner, name):
                setattr(inner, name, value)
    for name in (
        "is_available",
        "current_stream",
        "synchronize",
        "empty_cache",
        "device_count",
        "memory_allocated",
        "max_memory_allocated",
    ):
        setattr(torch.accelerator, name, functions[name])
    torch.accelerator.current_device_index = order.current_device
    torch.accelerator.set_device_index = order.set_device
    torch.compile = lambda function=None, **_: function if function is not None else lambda decorated: decorated  # type: ignore[assignment]
    torch.Generator = generators.Generator  # type: ignore[misc]
    ctypes.CDLL = _Library  # type: ignore[misc]
    tensors.install()
    collectives.install()
    from torch.autograd import Variable

    Variable._execution_engine = _Engine(Variable._execution_engine)
    modes.Functions().__enter__()
    modes.Operators().__enter__()
