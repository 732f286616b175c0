"""Move policy, critic and the rollout engine between device and host, so that they take turns on the device.

A model's memory has three parts that move separately: ``params`` (the parameter buffers, and frozen parameters, which Megatron leaves
out of its buffers), ``grads`` (freed and allocated again, never copied) and ``optimizer`` (main parameters and every moment). Parameter
and gradient buffers use Megatron's own buffer offload, with host buffers of the pool; optimizer state and frozen parameters
use the same host pool. Tensors keep their identity: only their storage is emptied and filled again, so views (bucket slices, fp32
optimizer shards of the parameter buffer) stay valid. An optimizer on the CPU (``cpu_offload``) keeps its state in host memory:
it never moves, and the ``optimizer`` part is empty.

The code is the same without CUDA: storages are emptied and filled in the same way, and "device" and "host" bytes are counted
separately, which tests check.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.optimizer import hybrid_optimizers

if TYPE_CHECKING:
    from vapo_mcore.megatron.engine import MegatronModel

Part = Literal["params", "grads", "optimizer"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")
Stage = Literal["generate", "logprobs", "values", "critic_update", "policy_update", "sync"]

RESIDENCY: Mapping[Stage, Mapping[str, frozenset[Part]]] = {
    "generate": {},
    "logprobs": {"policy": frozenset({"params"})},
    "values": {"critic": frozenset({"params"})},
    "critic_update": {"critic": frozenset(PARTS)},
    "policy_update": {"policy": frozenset(PARTS)},
    "sync": {"policy": frozenset({"params"})},
}
"""Who is on the device in each stage: model -> parts. Unlisted parts are on the host; gradients are freed."""


class HostPool:
    """Host memory for offloaded tensors: each key's buffer is allocated once, with its exact size, and reused by every move.

    With CUDA the buffers are page-locked by registration, which takes exactly their size (PyTorch's own pinned allocator rounds
    up to a power of two).
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held; they only grow when a new key appears."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())

    def buffer(self, key: tuple[Any, ...], like: Tensor) -> Tensor:
        """Return the host buffer of ``key``, [numel] in the dtype of ``like``; its values are not copied from ``like``.

        Raises MemoryError if the host lacks the memory.
        """
        if key not in self._buffers:
            self._buffers[key] = _allocate(like.numel(), like.dtype)
        found = self._buffers[key]
        assert found.numel() == like.numel() and found.dtype == like.dtype, f"offload: tensor {key} changed its size or type"
        return found

    def arena(self, owner: str, num_bytes: int) -> Tensor:
        """Return the first ``num_bytes`` of the buffer of ``owner``, uint8, contents undefined; reallocated only if too small.

        Raises MemoryError; ``owner`` then has no buffer.
        """
        key = (owner, "arena")
        if key not in self._buffers or self._buffers[key].numel() < num_bytes:
            self.release(owner)
            self._buffers[key] = _allocate(num_bytes, torch.uint8)
        return self._buffers[key][:num_bytes]

    def release(self, owner: str, kind: str | None = None) -> None:
        """Free the buffers of one model, whose keys begin with its name; with ``kind``, only those with that second part.

        Their contents must be on the device, or no longer needed. Waits for copies in progress.
        """
        _synchronize()
        for key in [key for key in self._buffers if key[0] == owner and kind in (None, key[1])]:
            self._unlock(key, self._buffers.pop(key))

    def clear(self) -> None:
        """Free all buffers of models that are no longer used. Without this call their memory would stay page-locked."""
        while self._buffers:
            self._unlock(*self._buffers.popitem())

    @staticmethod
    def _unlock(key: tuple[Any, ...], buffer: Tensor) -> None:
        if HAS_CUDA and buffer.numel() > 0:
            code = int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))  # type: ignore[attr-defined]
            if code != 0:
                raise RuntimeError(f"cannot unlock the host buffer {key}: CUDA error {code} ({clear_cuda_error(code)})")


def _allocate(numel: int, dtype: torch.dtype) -> Tensor:
    try:
        buffer = torch.empty(numel, dtype=dtype)
    except RuntimeError as error:  # torch's CPU allocator raises no more specific type
        raise MemoryError(f"cannot allocate {numel * dtype.itemsize} bytes of host memory") from error
    if HAS_CUDA and numel > 0:
        _page_lock(buffer)
    return buffer


def _page_lock(buffer: Tensor) -> None:
    num_bytes = buffer.untyped_storage().nbytes()
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))  # type: ignore[attr-defined]
    if code != 0:
        meaning = clear_cuda_error(code)
        raise MemoryError(f"cannot page-lock {num_bytes} bytes of host memory for offloading: CUDA error {code} ({meaning})")


def clear_cuda_error(code: int) -> str:
    """Clear the error that a failed CUDA runtime call left in this thread, and return the meaning of ``code``.

    CUDA keeps the error of a failed call, and PyTorch checks for it after every kernel launch, so an unrelated kernel would raise it.
    PyTorch has no function that clears it; the runtime library is in the process's global scope, where ``import torch`` loads it.
    """
    ctypes.CDLL(None).cudaGetLastError()
    cudart: Any = torch.cuda.cudart()  # type: ignore[attr-defined]
    return str(cudart.cudaGetErrorString(cudart.cudaError(code)))


@dataclass
class Traffic:
    """Bytes moved so far by a process."""

    to_device: int = 0
    to_host: int = 0


class ModelOffloader:
    """Moves the parts of one trained model between device and host. Built when all parts are on the device.

    A part that has not changed since it last came from the host is dropped without a copy back: a forward pass costs one way.
    """

    def __init__(self, model: MegatronModel, pool: HostPool, traffic: Traffic | None = None) -> None:
        assert model.optimizer is not None, "a model without an optimizer has no buffers to move"
        self.model = model
        self.pool = pool
        self.traffic = traffic or Traffic()
        self.resident: set[Part] = set(PARTS)
        self._on_host: set[Part] = set()  # parts whose host copy is up to date
        self._offloaded_state: list[tuple[tuple[Any, ...], Tensor, int]] = []
        self._frozen = [parameter for chunk in model.chunks for parameter in chunk.parameters() if not parameter.requires_grad]
        self._frozen_bytes = [parameter.untyped_storage().nbytes() for parameter in self._frozen]
        self._hand_over_gradient_copies()

    @property
    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self.model.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _key(self, *rest: object) -> tuple[object, ...]:
        return (self.model.role, *rest)

    @property
    def _hybrids(self) -> list[Any]:
        assert self.model.optimizer is not None
        return list(hybrid_optimizers(self.model.optimizer.megatron))

    def _hand_over_gradient_copies(self) -> None:
        """Give a CPU optimizer pool buffers for its copies of the gradients: PyTorch would round the sizes up to powers of two."""
        for number, hybrid in enumerate(self._hybrids):
            for index, parameter in enumerate(hybrid.cpu_copys_map_gpu_param):
                copy = self.pool.buffer(self._key("gradient_copy", number, index), parameter).view(parameter.shape)
                hybrid.cpu_copy_map_grad[parameter] = parameter.grad = copy

    def host_state_bytes(self) -> int:
        """Return the bytes that a CPU optimizer holds outside the pool: main parameters and moments, each storage once."""
        found: dict[int, int] = {}
        for hybrid in self._hybrids:
            for parameter, main in hybrid.param_to_inner_param.items():
                values = (value for value in hybrid.state.get(parameter, {}).values() if isinstance(value, Tensor) and value.ndim > 0)
                found |= {_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in (main, *values)}
        return sum(found.values())

    def mark_changed(self) -> None:
        """Mark the host copies of resident parts as out of date, after an optimizer step or a load."""
        self._on_host -= self.resident

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the optimizer's tensors on the device: main parameters and every state key, each storage once.

        Yields nothing for a CPU optimizer. Leaves out views of parameter or gradient buffers (float32 models optimise slices of the
        parameter buffer) and 0-dimensional step counters, which are host scalars.
        """
        buffers = {_storage_id(buffer.param_data) for buffer in self._buffers} | {_storage_id(buffer.grad_data) for buffer in self._buffers}
        assert self.model.optimizer is not None
        on_the_cpu = self._hybrids
        for number, optimizer in enumerate(self.model.optimizer.megatron.chained_optimizers):
            if getattr(optimizer, "is_stub_optimizer", False) or optimizer.optimizer in on_the_cpu:
                continue
            parameters = [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
            for index, parameter in enumerate(parameters):
                if _storage_id(parameter) not in buffers:
                    yield f"{number}.{index}.main_param", parameter
                for key, value in optimizer.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.ndim > 0:
                        yield f"{number}.{index}.{key}", value

    def device_bytes(self) -> dict[Part, int]:
        """Return the bytes of each part on the device, from the sizes of the storages."""
        grads = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in self._buffers)
        params = sum(tensor.untyped_storage().nbytes() for tensor in (*(buffer.param_data for buffer in self._buffers), *self._frozen))
        state = sum(tensor.untyped_storage().nbytes() for _, tensor in self.state_tensors())
        return {"params": params, "grads": grads, "optimizer": state}

    def offload(self, parts: Iterable[Part]) -> None:
        """Empty the device memory of ``parts`` that are resident, copying what changed to the host."""
        for part in sorted(set(parts) & self.resident):
            if part == "optimizer":
                self._offload_optimizer()
            else:
                self._offload_buffers(part)
            self.resident.discard(part)
            if part != "grads":
                self._on_host.add(part)

    def onload(self, parts: Iterable[Part]) -> None:
        """Move ``parts`` that are not resident to the device; gradients become zeros."""
        for part in sorted(set(parts) - self.resident):
            if part == "optimizer":
                for key, tensor, num_bytes in self._offloaded_state:
                    tensor.untyped_storage().resize_(num_bytes)
                    tensor.detach().view(-1).copy_(self.pool.buffer(key, tensor), non_blocking=True)
                    self.traffic.to_device += num_bytes
                self._offloaded_state = []
            else:
                self._reload_buffers(part)
            self.resident.add(part)

    def release_copies(self) -> None:
        """Free the host copies of this model's parts, all of which must be on the device. The next move to the host allocates new ones."""
        assert self.resident == set(PARTS), f"only {sorted(self.resident)} of the {self.model.role} are on the device"
        for buffer in self._buffers:
            buffer.param_data_cpu = None
        for kind in ("params", "frozen", "optimizer"):
            self.pool.release(self.model.role, kind)
        self._on_host.clear()

    def drop_training_state(self) -> None:
        """Free gradients and optimizer state on the device without a copy to the host: the model is not trained again."""
        for buffer in self._buffers:
            buffer.grad_data.untyped_storage().resize_(0)
        for _, tensor in list(self.state_tensors()):
            tensor.untyped_storage().resize_(0)

    def _offload_buffers(self, part: Part) -> None:
        params = part == "params"
        keep = params and "params" in self._on_host
        with self.model.parallel.scope():
            for number, buffer in enumerate(self._buffers):
                if keep:  # what Megatron does, without the copy
                    buffer.param_data_size = buffer.param_data.numel()
                    buffer.param_data.untyped_storage().resize_(0)
                    continue
                if params:
                    # Megatron copies into this buffer if it is set; otherwise it allocates a pinned one
                    buffer.param_data_cpu = self.pool.buffer(self._key("params", number), buffer.param_data)
                    self.traffic.to_host += buffer.param_data.untyped_storage().nbytes()
                buffer.offload_to_cpu(move_params=params, move_grads=not params)
        if params:
            self._offload_frozen(keep)

    def _reload_buffers(self, part: Part) -> None:
        params = part == "params"
        with self.model.parallel.scope():
            for buffer in self._buffers:
                buffer.reload_from_cpu(move_params=params, move_grads=not params)
                if params:
                    self.traffic.to_device += buffer.param_data.untyped_storage().nbytes()
        if params:
            for number, (parameter, num_bytes) in enumerate(zip(self._frozen, self._frozen_bytes, strict=True)):
                parameter.untyped_storage().resize_(num_bytes)
                parameter.detach().view(-1).copy_(self.pool.buffer(self._key("frozen", number), parameter), non_blocking=True)
                self.traffic.to_device += num_bytes

    def _offload_frozen(self, keep: bool) -> None:
        """Empty the storages of parameters without gradients; ``keep``: their host copies are up to date."""
        for number, parameter in enumerate(self._frozen):
            storage = parameter.untyped_storage()
            assert parameter.is_contiguous() and storage.nbytes() == parameter.nbytes, "a frozen parameter is a view of another tensor"
            if not keep:
                self.pool.buffer(self._key("frozen", number), parameter).copy_(parameter.detach().view(-1), non_blocking=True)
                self.traffic.to_host += parameter.nbytes
            storage.resize_(0)

    def _offload_optimizer(self) -> None:
        unchanged = "optimizer" in self._on_host
        for name, tensor in list(self.state_tensors()):
            assert tensor.is_contiguous() and tensor.storage_offset() == 0, f"optimizer state {name} is a view of another tensor"
            key, num_bytes = self._key("optimizer", name), tensor.untyped_storage().nbytes()
            if not unchanged:
                self.pool.buffer(key, tensor).copy_(tensor.detach().view(-1), non_blocking=True)
                self.traffic.to_host += num_bytes
            tensor.untyped_storage().resize_(0)
            self._offloaded_state.append((key, tensor, num_bytes))

    @contextmanager
    def other_params(self, weights: list[Tensor]) -> Iterator[None]:
        """Run with other weights (a frozen reference's) in the parameter buffers; restores the model's weights bit for bit.

        ``weights`` are flat host tensors as :func:`copy_params` made them. The model's weights are not copied to the host if their
        host copies are up to date. The optimizer must not step meanwhile.
        """
        assert "params" in self.resident, "the parameters are offloaded"
        own = [self.pool.buffer(self._key("params", number), buffer.param_data) for number, buffer in enumerate(self._buffers)]
        if "params" not in self._on_host:
            for host, buffer in zip(own, self._buffers, strict=True):
                host.copy_(buffer.param_data, non_blocking=True)
                buffer.param_data_cpu = host
                self.traffic.to_host += buffer.param_data.untyped_storage().nbytes()
            self._on_host.add("params")
            _synchronize()
        self.fill_params(weights)
        try:
            yield
        finally:
            self.fill_params(own)

    @torch.no_grad()
    def fill_params(self, weights: list[Tensor]) -> None:
        """Copy flat host tensors, as :func:`copy_params` makes them, into the resident parameter buffers."""
        for buffer, source in zip(self._buffers, weights, strict=True):
            buffer.param_data.copy_(source, non_blocking=True)
            self.traffic.to_device += buffer.param_data.untyped_storage().nbytes()

    def copy_params(self, name: str) -> list[Tensor]:
        """Return host copies of the current parameter buffers, kept in the pool under ``name``: a frozen reference's weights."""
        copies = []
        for number, buffer in enumerate(self._buffers):
            host = self.pool.buffer(self._key(name, number), buffer.param_data)
            host.copy_(buffer.param_data)
            copies.append(host)
        return copies


class Residency:
    """The one function that moves between rows of :data:`RESIDENCY`, for all models of a run.

    Disabled, every model stays on the device and entering a stage costs nothing.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.pool = HostPool()
        self.traffic = Traffic()
        self.offloaders: dict[str, ModelOffloader] = {}

    def add(self, model: MegatronModel) -> None:
        """Add a new trainable model under the name of its role; if enabled, it leaves the device at once."""
        self.offloaders[model.role] = ModelOffloader(model, self.pool, self.traffic)
        self.enter("generate")

    def remove(self, name: str) -> None:
        """Remove a model, which cannot be trained again; its parameters stay on the device while they are referenced elsewhere."""
        offloader = self.offloaders.pop(name)
        offloader.drop_training_state()
        offloader.onload({"params"})
        _synchronize()
        self.pool.release(name)

    def enter(self, stage: Stage) -> None:
        """Make exactly this stage's row resident. Everything else leaves first, so that the peak is the larger of both rows."""
        if not self.enabled:
            return
        row = RESIDENCY[stage]
        for name, offloader in self.offloaders.items():
            offloader.offload(offloader.resident - row.get(name, frozenset()))
        _synchronize()
        release_gather_buffers()
        if HAS_CUDA:
            torch.cuda.empty_cache()
        for name, offloader in self.offloaders.items():
            offloader.onload(row.get(name, frozenset()))
        _synchronize()

    def mark_changed(self, name: str) -> None:
        """Mark the host copies of the named model as out of date, after an update."""
        self.offloaders[name].mark_changed()

    @contextmanager
    def always_enabled(self) -> Iterator[None]:
        """Offload within the block even if this is disabled; then all models return to the device and their host copies are freed."""
        usual, self.enabled = self.enabled, True
        try:
            yield
        finally:
            self.enabled = usual
            if not usual:
                for offloader in self.offloaders.values():
                    offloader.onload(PARTS)
                    offloader.release_copies()

    @contextmanager
    def all_resident(self) -> Iterator[None]:
        """Keep all models on the device within the block, for work that needs all state at once; then restore the stage."""
        before = {name: set(offloader.resident) for name, offloader in self.offloaders.items()}
        for offloader in self.offloaders.values():
            offloader.onload({"params", "optimizer"})
        _synchronize()
        try:
            yield
        finally:
            for name, offloader in self.offloaders.items():
                offloader.offload(offloader.resident - before[name])
            _synchronize()

    def device_bytes(self) -> int:
        """Return the bytes of model state on the device now."""
        return sum(sum(offloader.device_bytes().values()) for offloader in self.offloaders.values())

    def host_bytes(self) -> int:
        """Return the bytes of host memory held for offloading and by CPU optimizers."""
        return self.pool.num_bytes + sum(offloader.host_state_bytes() for offloader in self.offloaders.values())


def release_gather_buffers() -> None:
    """Free the buffers that Megatron keeps for the gathers of sequence parallelism; the next pass allocates them again."""
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:  # no process groups, no buffers
        parallel_state.get_global_memory_buffer().buffer.clear()


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_synchronize: Callable[[], None] = torch.cuda.synchronize if HAS_CUDA else lambda: None
