"""Streams, events and what happened before what.

Numbers are computed at once, in program order; what is tracked is whether CUDA would have had to compute them in that order. Each piece of
work has a mark (stream, tick). A stream's clock holds, for every stream, the last tick that it comes after; the host's clock the last tick
that it knows to be complete. An access is in order if the clock of who makes it covers the marks of the accesses it must follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tests.fake_cuda.faults import count_sync, fault

Clock = dict[int, int]
Mark = tuple[int, int]

HOST: Clock = {}
"""Work that the host knows to be complete."""


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class Stream:
    """``torch.cuda.Stream``: work in it runs in the order it is given, and after what it has been told to wait for."""

    _count = 0
    all: list[Stream] = []  # noqa: RUF012

    def __init__(self, device: Any = None, priority: int = 0, **_: object) -> None:
        del priority
        Stream._count += 1
        self.id = self.stream_id = self.cuda_stream = Stream._count
        self.device_index = device_number(device)
        self.clock: Clock = {self.id: 0}
        Stream.all.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def enqueue(self) -> Mark:
        """The mark of one more piece of work, which the host gives now: it comes after all that the host knows to be complete."""
        merge(self.clock, HOST)
        self.clock[self.id] += 1
        return self.id, self.clock[self.id]

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        count_sync("synchronize")
        merge(HOST, self.clock)

    def query(self) -> bool:
        return all(HOST.get(stream, 0) >= tick for stream, tick in self.clock.items())

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        _current.setdefault(self.device_index, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current[self.device_index].pop()


class Event:
    """``torch.cuda.Event``: a point in a stream's work."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: object) -> None:
        del enable_timing, blocking, interprocess
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or current_stream()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        count_sync("synchronize")
        merge(HOST, self.clock)

    def query(self) -> bool:
        return all(HOST.get(stream, 0) >= tick for stream, tick in self.clock.items())

    def elapsed_time(self, other: Event) -> float:
        del other
        return 0.0


_default: dict[int, Stream] = {}
_current: dict[int, list[Stream]] = {}
_device = [0]


def current_device() -> int:
    return _device[-1]


def set_device(device: Any) -> None:
    number = device_number(device)
    if number >= 0:
        _device[-1] = number


def names_cuda(device: Any) -> bool:
    """Whether a device, however it is written, is a CUDA device."""
    return isinstance(device, int) or torch.device(device).type == "cuda"


def device_number(device: Any) -> int:
    """The index of a CUDA device however it is written; the current one where it says none."""
    if isinstance(device, int):
        return device
    if device is None:
        return current_device()
    index = torch.device(device).index
    return current_device() if index is None else index


def default_stream(device: Any = None) -> Stream:
    number = device_number(device)
    if number not in _default:
        _default[number] = Stream(number)
    return _default[number]


def current_stream(device: Any = None) -> Stream:
    stack = _current.get(device_number(device))
    return stack[-1] if stack else default_stream(device)


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: Any = None) -> None:
    """``torch.cuda.synchronize``: the host waits for all streams of the device."""
    count_sync("synchronize")
    complete(device_number(device))


def complete(number: int) -> None:
    for stream in Stream.all:
        if stream.device_index == number:
            merge(HOST, stream.clock)


Span = tuple[int, int]
"""First byte and the one after the last, within a storage."""
EVERYTHING: Span = (0, 2**62)


class Accesses:
    """Marks of the last writes to a storage, with the bytes that they write, and of the reads since.

    A stream's writes are in order, so its last mark stands for all of its bytes. Those of collectives are kept one by one: while the
    gradients of one bucket are reduced, others of the same buffer are written.
    """

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.writes: list[tuple[Mark, Span]] = []
        self.reads: Clock = {}

    def check(self, clock: Mapping[int, int], *, writes: bool, what: str, span: Span = EVERYTHING) -> None:
        """FakeCudaError unless an access of whoever has this clock is ordered after those it must follow."""
        for (stream, tick), (begin, end) in self.writes:
            if begin < span[1] and span[0] < end and clock.get(stream, 0) < tick:
                fault(f"{what} before the {_name(stream)} that writes it is known to have ended")
        if writes:
            for stream, tick in self.reads.items():
                if clock.get(stream, 0) < tick:
                    fault(f"{what} is overwritten while the {_name(stream)} may still read it")

    def add(self, mark: Mark, *, writes: bool, span: Span = EVERYTHING) -> None:
        if not writes:
            self.reads[mark[0]] = mark[1]
            return
        kept = [(other, at) for other, at in self.writes if not (span[0] <= at[0] and at[1] <= span[1])]
        if mark[0] not in COMMUNICATION:
            own = [span, *(at for other, at in kept if other[0] == mark[0])]
            span = min(at[0] for at in own), max(at[1] for at in own)
            kept = [(other, at) for other, at in kept if other[0] != mark[0]]
        self.writes = [*kept, (mark, span)]
        self.reads.clear()

    def settled(self, clock: Mapping[int, int], *, ignore: frozenset[int] = frozenset()) -> bool:
        """Whether all accesses come before what this clock covers."""
        marks = [*self.reads.items(), *(mark for mark, _ in self.writes)]
        return all(clock.get(stream, 0) >= tick for stream, tick in marks if stream not in ignore)


def _name(stream: int) -> str:
    return f"stream {stream}" if stream not in COMMUNICATION else "collective"


COMMUNICATION: set[int] = set()
"""Streams that belong to process groups."""
