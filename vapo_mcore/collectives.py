"""Small collectives of Python objects over the world, and the rule that an error of one rank is an error of all.

Rank 0 takes decisions (stop, dynamic sampling, evaluation) and broadcasts them; no rank decides for itself.
All functions also work without a process group, as a world of one.
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
    """(rank, world size)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_gather_objects(value: T) -> list[T]:
    """Every rank's value, by rank."""
    _, size = world()
    if size == 1:
        return [value]
    gathered: list[T | None] = [None] * size
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def gather_objects(value: T) -> list[T] | None:
    """Every rank's value, by rank, on the first one; None on the others."""
    rank, size = world()
    if size == 1:
        return [value]
    gathered: list[T | None] | None = [None] * size if rank == 0 else None
    dist.gather_object(value, gathered)
    return gathered  # type: ignore[return-value]


def broadcast_object(value: T, source: int = 0) -> T:
    """The value of rank ``source`` on every rank."""
    _, size = world()
    if size == 1:
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=source)
    return holder[0]


@contextmanager
def fail_together() -> Iterator[None]:
    """Run local work; a VapoError in it on any rank is raised on all ranks with the same message.

    The block must not contain collectives: a failed rank would leave the others waiting in them.
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
    """Returns whether a collective failed because another rank is gone (recognised by gloo's text, by NCCL's type)."""
    closed = ("Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or any(text in str(error) for text in closed)
