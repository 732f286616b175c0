"""Which storage is on which device, and the allocator's counters.

The facts are an attribute of the storage itself (PyTorch keeps one Python object per storage for as long as the storage lives), so they
follow every view and end with the memory.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from tests.fake_cuda.faults import fault, note, place
from tests.fake_cuda.order import COMMUNICATION, HOST, Accesses, default_stream

TOTAL_BYTES = int(os.environ.get("FAKE_CUDA_BYTES", 80 << 30))
ROUNDING = 512
"""The CUDA allocator gives multiples of it."""


class Counters:
    """Of one device, in bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.reserved_peak = 0

    def change(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        if self.allocated > TOTAL_BYTES:
            raise torch.OutOfMemoryError(f"CUDA out of memory (fake): {self.allocated} bytes of {TOTAL_BYTES}")


COUNTERS: dict[int, Counters] = {}


def counters(device: int) -> Counters:
    return COUNTERS.setdefault(device, Counters())


class Memory:
    """Facts of one storage. ``device``: its index, None for host memory.

    ``pinned``: page-locked by PyTorch's allocator. ``registered``: page-locked by ``cudaHostRegister``. ``recorded``: streams given to
    ``record_stream``. ``stream``: the one it was allocated on.
    """

    __slots__ = ("__weakref__", "accesses", "device", "num_bytes", "pinned", "place", "recorded", "registered", "stream")

    def __init__(self, device: int | None, num_bytes: int, stream: Any = None) -> None:
        self.device, self.stream, self.num_bytes = device, stream, 0
        self.pinned = self.registered = False
        self.recorded: set[int] = set()
        self.accesses = Accesses()
        self.place = ""
        if device is not None:
            self.place = place()
            _LIVE.add(self)
            self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        """The storage has this size now; what it shrinks by goes back to the allocator."""
        if self.device is None:
            return
        rounded = -(-num_bytes // ROUNDING) * ROUNDING
        if rounded < self.num_bytes:
            self._may_be_freed()
        change = rounded - self.num_bytes
        self.num_bytes = rounded
        counters(self.device).change(change)

    def _may_be_freed(self) -> None:
        clock = dict((self.stream or default_stream(self.device)).clock)
        for stream, tick in HOST.items():
            clock[stream] = max(clock.get(stream, 0), tick)
        if not self.accesses.settled(clock, ignore=frozenset(self.recorded | COMMUNICATION)):
            note(f"device memory of {self.place} is given back while another stream may still use it (no record_stream)")

    def __del__(self) -> None:
        if self.device is not None:
            self.resize(0)
        elif self.registered:
            note("page-locked host memory is freed without cudaHostUnregister")


_LIVE: weakref.WeakSet[Memory] = weakref.WeakSet()


def live(device: int = 0) -> dict[str, int]:
    """Where live device memory was allocated (file:line) -> bytes, largest first; storages that are emptied count nothing."""
    found: dict[str, int] = {}
    for memory in list(_LIVE):
        if memory.device == device and memory.num_bytes:
            found[memory.place] = found.get(memory.place, 0) + memory.num_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def storage_of(tensor: torch.Tensor) -> Any:
    """None for tensors without memory (meta, functional, sparse)."""
    with torch._C.DisableTorchFunction():  # else the call would pass through the function mode
        if tensor.is_meta:
            return None
        try:
            return _STORAGE(tensor)
        except (NotImplementedError, RuntimeError):
            return None


_STORAGE = torch.Tensor.untyped_storage


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a strided tensor with elements spans."""
    size, begin = tensor.element_size(), tensor.storage_offset()
    last = begin + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size


def memory_of(tensor: torch.Tensor) -> Memory | None:
    storage = storage_of(tensor)
    return None if storage is None else getattr(storage, "fake_cuda", None)


def device_of(tensor: torch.Tensor) -> int | None:
    """Index of the CUDA device that the tensor is on; None: none."""
    memory = memory_of(tensor)
    return None if memory is None else memory.device


def put(tensor: torch.Tensor, device: int, stream: Any) -> None:
    """Say that a fresh storage is on a device."""
    storage = storage_of(tensor)
    if storage is None or (getattr(storage, "fake_cuda", None) is not None and storage.fake_cuda.device is not None):
        return
    own = int(os.environ.get("LOCAL_RANK", "0"))
    if device != own:
        fault(f"memory on cuda:{device} in the process of cuda:{own}")
    storage.fake_cuda = Memory(device, storage.nbytes(), stream)


HOST_MEMORY: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
"""Address -> facts of host memory made by ``torch.empty``: what ``cudaHostRegister`` may be given."""


def host_facts(tensor: torch.Tensor) -> Memory:
    """The facts of a host tensor's storage, made where there are none."""
    storage = storage_of(tensor)
    found = getattr(storage, "fake_cuda", None)
    if found is None:
        found = storage.fake_cuda = Memory(None, 0)
        if storage.nbytes():
            HOST_MEMORY[storage.data_ptr()] = found
    return found
