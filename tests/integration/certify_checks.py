"""A user's checks and a verifier, for certify_worker.py."""

from __future__ import annotations

from typing import Any

from vapo_mcore.certify.record import Measurement, holds


def holding(bench: Any) -> Measurement:
    return holds("ranks", f"{bench.parallel.world_size}", "two", 2.0)


def raising(bench: Any) -> list[Measurement]:
    raise ValueError("no such thing")


def empty(bench: Any) -> list[Measurement]:
    return []


def everything_right(response: str, ground_truth: str, metadata: Any) -> float:
    return 1.0
