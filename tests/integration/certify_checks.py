"""A user's checks and a verifier, for certify_worker.py."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

from vapo_mcore.certify import bench as bench_module
from vapo_mcore.certify.record import Measurement, fails, holds
from vapo_mcore.collectives import all_gather_objects, broadcast_object
from vapo_mcore.errors import EngineRemains


def holding(bench: Any) -> Measurement:
    return holds("ranks", f"{bench.parallel.world_size}", "two", 2.0)


def alone(bench: Any) -> Measurement:
    """Rank 0 reads texts alone, then asks alone for the engine, which all ranks build together."""
    found = fails("engine on one rank", "built")
    if bench.parallel.rank == 0:
        assert len(bench.sequences) == 8 and len(bench.prompts.items) == 24
        try:
            with mock.patch.object(bench_module, "MEETING_SECONDS", 0.2):
                _ = bench.engine
        except RuntimeError as error:
            found = holds("engine on one rank", str(error))
    return broadcast_object(found)


def raising(bench: Any) -> list[Measurement]:
    raise ValueError("no such thing")


def dying(bench: Any) -> list[Measurement]:
    """A rank that is killed, as by the kernel when memory runs out."""
    if bench.parallel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [holds("both ranks", str(all_gather_objects(1)))]


def broken(bench: Any) -> list[Measurement]:
    raise RuntimeError("the device is gone")


def restarting(bench: Any) -> list[Measurement]:
    raise EngineRemains("the failed engine still holds device memory")


def empty(bench: Any) -> list[Measurement]:
    return []


def everything_right(response: str, ground_truth: str, metadata: Any) -> float:
    return 1.0
