"""Compare packed causal attention of a micro-batch with one plain SDPA call per sequence, forward and backward, on CPU.

    python benchmarks/attention.py

Prints one JSON line; ``time_ratio`` is the time of SegmentAttention, called as in Megatron-Core, over that of the plain calls.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from vapo_mcore.megatron.attention import SegmentAttention

LENGTHS = [700, 60, 1300, 250, 480, 33, 900, 370]
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # SmolLM2-135M
ROUNDS = 7


class GroupOfOne:
    """A context-parallel group of one process."""

    def size(self) -> int:
        return 1


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    shapes = ((total, HEADS, HEAD_DIM), (total, KV_HEADS, HEAD_DIM), (total, KV_HEADS, HEAD_DIM))
    query, key, value = (torch.randn(shape).requires_grad_() for shape in shapes)
    grad = torch.randn(total, HEADS * HEAD_DIM)
    groups: Any = SimpleNamespace(cp=GroupOfOne())
    attention = SegmentAttention(None, 1, None, "self", pg_collection=groups)
    params = SimpleNamespace(padded_lengths=LENGTHS)

    def packed() -> None:
        attention(query, key, value, None, packed_seq_params=params).backward(grad)

    def bare() -> None:
        start = 0
        for length in LENGTHS:
            part = slice(start, start + length)
            q, k, v = (x[part].transpose(0, 1)[None] for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out[0].transpose(0, 1).reshape(length, -1).backward(grad[part])
            start += length

    for function in (packed, bare):
        function()
    pairs = [(seconds(packed), seconds(bare)) for _ in range(ROUNDS)]
    facts = {
        "benchmark": "attention",
        "tokens": total,
        "sequences": len(LENGTHS),
        "seconds": round(statistics.median(p for p, _ in pairs), 4),
    }
    facts |= {"time_ratio": round(statistics.median(p / b for p, b in pairs), 3), "time_ratio_target": 1.15}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
