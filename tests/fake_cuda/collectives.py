"""NCCL's rules over gloo: device tensors only, work in a stream of the group, results of asynchronous collectives after ``wait()``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_cuda import order
from tests.fake_cuda.faults import count_sync, fault
from tests.fake_cuda.memory import device_of, memory_of, span_of

_gloo_groups: set[str] = set()
"""Groups that were asked for with the gloo backend: they take host tensors."""
_streams: dict[str, order.Stream] = {}


class _Ticket:
    """What an asynchronous collective's ``wait`` makes the current stream come after."""

    def __init__(self) -> None:
        self.clock: order.Clock = {}

    def wait(self) -> None:
        order.merge(order.current_stream().clock, self.clock)


_tickets: list[_Ticket | None] = []
_of_objects = [0]


@contextmanager
def _calling(asynchronous: bool) -> Iterator[_Ticket]:
    ticket = _Ticket()
    _tickets.append(ticket if asynchronous else None)
    try:
        yield ticket
    finally:
        _tickets.pop()


def running() -> bool:
    """Whether a collective is being called."""
    return bool(_tickets)


class Work:
    """A handle of NCCL: ``wait`` orders the current stream, it does not stop the host, and may be called again."""

    def __init__(self, real: Any, ticket: _Ticket) -> None:
        self.real, self.ticket = real, ticket
        self.result: list[Any] = []

    def wait(self, *args: Any) -> Any:
        self.ticket.wait()
        if not self.result:  # gloo's second wait for a message never returns
            with _calling(False):  # gloo copies its results when it is waited for: not a wait of the host on the device
                self.result.append(self.real.wait(*args))
        return self.result[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def enter(name: str, args: tuple, tensors: list[Tensor]) -> None:
    """Called before every operator of a process group."""
    if _of_objects[0]:
        return
    group = _name(args)
    data = [tensor for tensor in tensors if tensor.numel()]
    if group in _gloo_groups:
        for tensor in data:
            if device_of(tensor) is not None:
                fault(f"{name}: a CUDA tensor {tuple(tensor.shape)} in a gloo group")
        return
    if "barrier" in name:
        count_sync("barrier")
        order.complete(order.current_device())
        return
    for tensor in data:
        if device_of(tensor) != order.current_device():
            fault(
                f"{name}: NCCL takes tensors of cuda:{order.current_device()}, not {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    stream, current = _streams.get(group) or _new_stream(group), order.current_stream()
    stream.wait_stream(current)
    mark, writes = stream.enqueue(), not name.startswith("c10d.send")
    for tensor in data:
        facts = memory_of(tensor)
        assert facts is not None
        span = span_of(tensor)
        facts.accesses.check(stream.clock, writes=writes, what=f"{name}: a tensor {tuple(tensor.shape)}", span=span)
        facts.accesses.add(mark, writes=writes, span=span)
    ticket = _tickets[-1] if _tickets else None
    if ticket is None:
        current.wait_stream(stream)
    else:
        order.merge(ticket.clock, stream.clock)


def _new_stream(group: str) -> order.Stream:
    _streams[group] = stream = order.Stream()
    order.COMMUNICATION.add(stream.id)
    return stream


def _name(args: tuple) -> str:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(value).group_name)  # type: ignore[attr-defined]
            except (RuntimeError, TypeError):  # a ReduceOp
                continue
    return ""


def _wrap(function: Any) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        asynchronous = bool(bound.get("async_op")) or function.__name__ in ("isend", "irecv")
        if _tickets and _tickets[-1] is not None:  # inside a coalescing manager, which waits for all
            return function(*args, **kwargs)
        with _calling(asynchronous) as ticket:
            work = function(*args, **kwargs)
        return Work(work, ticket) if asynchronous and work is not None else work

    return call


def _of_any_sizes(function: Any) -> Any:
    """Let ranks gather and scatter different numbers of rows, as NCCL does: by what replaces gloo's collectives on CPUs."""
    if function.__name__ not in ("all_gather", "reduce_scatter"):
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first, second, *_ = signature.bind(*args, **kwargs).arguments.values()
        if len({len(part) for part in (first if isinstance(first, list) else second) if part.dim()}) <= 1:
            return function(*args, **kwargs)
        from vapo_mcore.megatron import host  # asks for CUDA at import

        replacement = host._all_gather if function.__name__ == "all_gather" else host._reduce_scatter
        return replacement(*args, **kwargs)

    return call


def _wrap_objects(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        count_sync("objects")
        order.complete(order.current_device())
        _of_objects[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            _of_objects[0] -= 1

    return call


_TENSOR_CALLS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "_all_gather_base",
    "_reduce_scatter_base",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "isend",
    "irecv",
    "send",
    "recv",
)
_OBJECT_CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def install() -> None:
    module = dist.distributed_c10d
    init, new_group, manager = module.init_process_group, module.new_group, module._coalescing_manager

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init("gloo", *args, **kwargs)
        if backend == "gloo":
            _gloo_groups.add(module._get_default_group().group_name)

    @functools.wraps(new_group)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.pop("backend", None)
        kwargs.pop("pg_options", None)
        group = new_group(*args, **kwargs)
        if backend == "gloo" and group is not None and hasattr(group, "group_name"):
            _gloo_groups.add(group.group_name)
        return group

    @contextmanager
    def coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with _calling(True) as ticket, manager(group, None, async_ops) as works:
            works_wait = works.wait

            def wait() -> None:
                ticket.wait()
                works_wait()

            works.wait = wait  # type: ignore[method-assign]
            yield works
        if not async_ops:
            ticket.wait()

    replaced: dict[str, Any] = {
        "init_process_group": init_process_group,
        "new_group": make_group,
        "_coalescing_manager": coalescing_manager,
    }
    replaced |= {name: _wrap(_of_any_sizes(getattr(module, name))) for name in _TENSOR_CALLS}
    replaced |= {name: _wrap_objects(getattr(module, name)) for name in _OBJECT_CALLS}
    for name, value in replaced.items():
        setattr(module, name, value)
        if hasattr(dist, name):
            setattr(dist, name, value)
    module._get_object_coll_device = lambda group=None: "cpu"  # type: ignore[assignment]
