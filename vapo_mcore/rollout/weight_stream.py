"""Stream the tensors of a weight sync to a loader, checking names and shapes, counting bytes and computing checksums."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor

from vapo_mcore.errors import RolloutError
from vapo_mcore.rollout.base import WeightBuckets

_SHOWN = 8


def listed(names: Collection[str]) -> str:
    """Format names for a message: the first few, sorted, and the number of further ones."""
    some = sorted(names)[:_SHOWN]
    more = len(names) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


def require_same_names(expected: Collection[str], model: Collection[str]) -> None:
    """Raise RolloutError naming tensors that the sync would not deliver and tensors that the model lacks."""
    missing, surplus = set(model) - set(expected), set(expected) - set(model)
    faults = []
    if missing:
        faults.append(f"missing ({len(missing)}): {listed(missing)}")
    if surplus:
        faults.append(f"not in the model ({len(surplus)}): {listed(surplus)}")
    if faults:
        raise RolloutError(f"weight sync: the announced names do not match the rollout model; {'; '.join(faults)}")


class WeightStream:
    """Iterates ``(name, tensor)`` for a loader, once.

    Tensors that the model lacks, that were already delivered or that have the wrong shape are not passed to the loader. :meth:`finish`
    reports them after consuming all buckets, which may come from collectives: stopping earlier would hang the other ranks.
    """

    def __init__(self, buckets: WeightBuckets, shapes: Mapping[str, tuple[int, ...]], checksum: Callable[[Tensor], str] | None) -> None:
        self._buckets = iter(buckets)
        self._shapes = shapes
        self._checksum = checksum
        self._delivered: set[str] = set()
        self._surplus: list[str] = []
        self._repeated: list[str] = []
        self._misshaped: list[str] = []
        self._exhausted = False
        self.bytes = 0
        self.produce_seconds = 0.0
        self.checksums: dict[str, str] | None = {} if checksum else None

    @property
    def names(self) -> int:
        """Number of tensors passed to the loader."""
        return len(self._delivered)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._next_bucket()) is not None:
            while bucket:  # pop while reading, so that no tensor of it is alive when the next bucket is built
                name, tensor = bucket.pop(0)
                if self._accept(name, tensor):
                    yield name, tensor
                del tensor

    def finish(self) -> None:
        """Consume the remaining buckets, then raise RolloutError unless exactly the model's tensors were loaded."""
        unread = self._drain()
        faults = []
        missing = set(self._shapes) - self._delivered
        if missing:
            faults.append(f"missing ({len(missing)}): {listed(missing)}")
        if self._surplus:
            faults.append(f"not in the model ({len(self._surplus)}): {listed(self._surplus)}")
        if self._repeated:
            faults.append(f"delivered twice ({len(self._repeated)}): {listed(self._repeated)}")
        if self._misshaped:
            faults.append(f"wrong shape ({len(self._misshaped)}): {listed(self._misshaped)}")
        if unread:
            faults.append(f"not read by the loader ({len(unread)}): {listed(unread)}")
        if faults:
            raise RolloutError(f"weight sync: the delivered tensors do not match the rollout model; {'; '.join(faults)}")

    def _next_bucket(self) -> list[tuple[str, Tensor]] | None:
        start = time.perf_counter()
        bucket = next(self._buckets, None)
        self.produce_seconds += time.perf_counter() - start
        self._exhausted = bucket is None
        return None if bucket is None else list(bucket)

    def _accept(self, name: str, tensor: Tensor) -> bool:
        shape = self._shapes.get(name)
        if shape is None:
            self._surplus.append(name)
        elif name in self._delivered:
            self._repeated.append(name)
        elif tuple(tensor.shape) != shape:
            self._misshaped.append(f"{name} {tuple(tensor.shape)} instead of {shape}")
        else:
            self._delivered.add(name)
            self.bytes += tensor.numel() * tensor.element_size()
            if self._checksum is not None and self.checksums is not None:
                start = time.perf_counter()
                self.checksums[name] = self._checksum(tensor)
                self.produce_seconds += time.perf_counter() - start
            return True
        return False

    def _drain(self) -> list[str]:
        unread: list[str] = []
        while not self._exhausted:
            bucket = self._next_bucket()
            unread += [name for name, _ in bucket or []]
        return unread
