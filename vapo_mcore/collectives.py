"""Gather and broadcast Python objects over all ranks, and raise an error of any rank on all ranks.

Rank 0 makes decisions (stop, dynamic sampling, evaluation) and broadcasts them; other ranks never decide alone. Without a process group
all functions act as with a world size of 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from vapo_mcore import errors
from vapo_mcore.errors import VapoError

T = TypeVar("T")


def world() -> tuple[int, int]:
    """Return (rank, world size)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, indexed by rank."""
    _, size = world()
    if size == 1:
        return [value]
    gathered: list[T | None] = [None] * size
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def gather_objects(value: T) -> list[T] | None:
    """Return the values of all ranks, indexed by rank, on rank 0; None on other ranks."""
    rank, size = world()
    if size == 1:
        return [value]
    gathered: list[T | None] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, gathered)
    return gathered  # type: ignore[return-value]


def broadcast_object(value: T) -> T:
    """Broadcast the value of rank 0 and return it on every rank."""
    _, size = world()
    if size == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


@contextmanager
def fail_together() -> Iterator[None]:
    """Run a block of local work. A VapoError on any rank is raised on all ranks with the same message.

    The block must not contain collectives: after a failure on one rank the others would block in them.
    """
    failure: tuple[str, str] | None = None
    try:
        yield
    except VapoError as error:
        failure = (type(error).__name__, str(error))
    failures = all_gather_objects(failure)
    found = [item for item in failures if item is not None]
    if not found:
        return
    kind = getattr(errors, found[0][0], VapoError)
    messages = list(dict.fromkeys(message for _, message in found))
    raise kind("\n".join(messages))


def lost_a_peer(error: BaseException) -> bool:
    """Return whether a collective failed because another rank exited (recognised by gloo's message or NCCL's exception type)."""
    closed = ("Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or any(text in str(error) for text in closed)
