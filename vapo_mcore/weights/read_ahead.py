"""Prefetch the tensors of a model in a thread, within bounded memory."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from vapo_mcore.weights.views import HfView

_AHEAD_BYTES = 128 << 20


@contextmanager
def read_ahead(view: HfView) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Iterate over ``(name, tensor)`` of all HF tensors of ``view`` in plan order, read by a thread.

    Holds at most 128 MiB of prefetched tensors (or a single larger one). Read errors are raised when the iterator reaches the
    tensor. Leaving the context joins the thread.
    """
    queue = _Queue(_AHEAD_BYTES)
    thread = threading.Thread(target=_read_all, args=(view, queue), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield iter(queue.take, None)  # type: ignore[arg-type]
    finally:
        queue.stop()
        thread.join()


def _read_all(view: HfView, queue: _Queue) -> None:
    try:
        for entry in view.plan:
            reading = view.tensors(entry)
            for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
                if not queue.reserve(math.prod(shape) * view.dtype(name).itemsize):
                    return
                queue.put(next(reading))
        queue.put(None)
    except BaseException as error:  # noqa: BLE001 - raised again by the consumer
        queue.put(error)


class _Queue:
    """Bounded FIFO between one producer and one consumer; the producer reserves space before it reads an item."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[str, Tensor] | BaseException | None] = deque()
        self._bytes = 0
        self._stopped = False
        self._changed = threading.Condition()

    def reserve(self, num_bytes: int) -> bool:
        """Wait for space; returns False if the consumer has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._waiting or self._bytes + num_bytes <= self._limit)
            return not self._stopped

    def put(self, item: tuple[str, Tensor] | BaseException | None) -> None:
        with self._changed:
            self._bytes += item[1].nbytes if isinstance(item, tuple) else 0
            self._waiting.append(item)
            self._changed.notify()

    def take(self) -> tuple[str, Tensor] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            item = self._waiting.popleft()
            if isinstance(item, BaseException):
                raise item
            self._bytes -= item[1].nbytes if item is not None else 0
            self._changed.notify()
            return item

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
