"""Check all ranks together: connections and their speed, clocks, and a shared file system."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vapo_mcore.doctor.report import Finding

_BYTES = 64 * 2**20
_ROUNDS = 5
_CLOCK_SECONDS = 1.0
_SECONDS_FOR_FILES = 10.0
T = TypeVar("T")


def connect(seconds: float) -> Finding | None:
    """Join the process group of torchrun's environment. Returns the failure, or None."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        # Gloo carries the findings, which must arrive even if NCCL does not work.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError, ValueError) as error:
        return Finding(
            "ranks", "FAIL", f"{socket.gethostname()} cannot join the ranks at {where} within {seconds:.0f} s: {_first_line(error)}"
        )
    return None


def all_reduce(seconds: float) -> Finding:
    """Sum a tensor over all ranks, check it, and measure the bus bandwidth."""
    world, cuda = dist.get_world_size(), torch.cuda.is_available()
    name = f"all-reduce ({'NCCL' if cuda else 'gloo'})"
    try:
        tensor, best = timed_sum(timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError) as error:
        return Finding(name, "FAIL", f"of {_BYTES >> 20} MiB over {world} ranks: {_first_line(error)}")
    expected = world * (world + 1) / 2
    wrong = int((tensor != expected).sum())
    if wrong:
        return Finding(
            name,
            "FAIL",
            f"{wrong} of {tensor.numel()} sums over {world} ranks are wrong: {float(tensor[tensor != expected][0])}, not {expected}",
        )
    bandwidth = bus_bandwidth(world, best)
    return Finding(name, "ok", f"{_BYTES >> 20} MiB over {world} ranks in {best * 1e3:.1f} ms: {bandwidth / 1e9:.2f} GB/s bus bandwidth")


def timed_sum(timeout: timedelta, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, float]:
    """Sum tensors of ``_BYTES`` over the ranks of a group (None: all), rank r + 1 in each element of rank r's.

    Returns the sum (float32), and the seconds of the fastest round except the first. Raises DistError or RuntimeError after ``timeout``.
    """
    cuda = torch.cuda.is_available()
    tensor = torch.empty(_BYTES // 4, device="cuda" if cuda else "cpu")
    times = []
    for _ in range(_ROUNDS):
        tensor.fill_(float(dist.get_rank(group) + 1))
        _synchronize(cuda)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group, async_op=True).wait(timeout)
        _synchronize(cuda)
        times.append(time.perf_counter() - start)
    return tensor, min(times[1:])


def bus_bandwidth(ranks: int, seconds: float) -> float:
    """Return 2 (n - 1) / n x bytes / time of a :func:`timed_sum`, as nccl-tests does: what each rank sends in a second, in bytes."""
    return 2 * (ranks - 1) / ranks * _BYTES / seconds


def clocks() -> Finding:
    """Measure the largest difference between the ranks' clocks, minimum over rounds: ranks leave an exchange at different times."""
    spreads = []
    for _ in range(_ROUNDS):
        gather(None)  # a barrier: all ranks leave it at about the same time
        times = gather(time.time())
        spreads.append(max(times) - min(times))
    spread = min(spreads)
    detail = f"of the ranks differ by at most {spread * 1e3:.0f} ms"
    if spread > _CLOCK_SECONDS:
        return Finding("clocks", "warn", f"{detail}: logs and checkpoint times of the nodes do not fit together; run an NTP daemon")
    return Finding("clocks", "ok", detail)


def shared_folder(folder: Path) -> Finding:
    """Rank 0 writes a file where the run will be; every rank reads it and writes a reply; rank 0 reads the replies."""
    world, rank = dist.get_world_size(), dist.get_rank()
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    [token, base] = broadcast([uuid.uuid4().hex, str(existing)])
    probe = Path(base) / f".vapo_mcore_doctor_{token}"
    mine = probe.with_name(f"{probe.name}_{rank}")
    fault = _attempt(lambda: probe.write_text(token)) if rank == 0 else None
    faults = [fault for fault in gather(fault) if fault]
    if not faults:
        seen = _eventually(lambda: probe.read_text() == token)
        fault = f"{socket.gethostname()} does not see what rank 0 wrote" if not seen else _attempt(lambda: mine.write_text(token))
        faults = [fault for fault in gather(fault) if fault]
    if not faults:
        others = [probe.with_name(f"{probe.name}_{other}") for other in range(world)]
        complete = rank != 0 or _eventually(lambda: all(other.is_file() for other in others))
        faults = [fault for fault in gather(None if complete else "rank 0 does not see what the others wrote") if fault]
    gather(None)  # a barrier: all ranks have read
    for file in (mine, probe) if rank == 0 else (mine,):
        file.unlink(missing_ok=True)
    if faults:
        return Finding("shared files", "FAIL", f"{base}: {'; '.join(dict.fromkeys(faults))}; run.dir must be on a file system of all nodes")
    return Finding("shared files", "ok", f"{base} is read and written by all {world} ranks")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the values of all ranks on all ranks. ``group``: a group of all ranks with another timeout."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(values: list[T]) -> list[T]:
    dist.broadcast_object_list(values, src=0)
    return values


def _attempt(write: Callable[[], object]) -> str | None:
    try:
        write()
    except OSError as error:
        return f"{socket.gethostname()}: {error.strerror}"
    return None


def _eventually(condition: Callable[[], bool]) -> bool:
    """Wait for a condition: network file systems show the files of other nodes with a delay."""
    deadline = time.monotonic() + _SECONDS_FOR_FILES
    while time.monotonic() < deadline:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
