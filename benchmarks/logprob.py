"""Measure vocab-parallel log-prob and entropy, forward and backward, on one rank's shard of a 152k vocabulary at TP = 8.

    python benchmarks/logprob.py [--tokens 8192]

Prints one JSON line per dtype and use of the entropy: none, its value (as recorded in training), or also its gradient (entropy bonus).
``time_ratio``: time over that of torch's cross-entropy (float32 logits, forward and backward) on the same tokens in chunks, with the
gradient stored in the logits' dtype as in a training step. ``memory_ratio``: peak extra resident memory, including the returned gradient,
over the bytes of the logits shard in its dtype; from the kernel's peak counter, which is reset before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from vapo_mcore.megatron.logprob import vocab_parallel_logprobs

LOCAL_VOCAB = 152064 // 8
ROUNDS = 5


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """Return the peak increase of resident memory while ``function`` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    before = int(fields["VmRSS"].split()[0])
    function()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(fields["VmHWM"].split()[0]) - before) * 1024


def measure(dtype: torch.dtype, tokens: int, entropy: str) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, LOCAL_VOCAB, generator=generator).to(dtype)
    labels = torch.randint(0, LOCAL_VOCAB, (tokens,), generator=generator)
    weight = torch.rand(tokens, generator=generator)

    def ours() -> None:
        leaf = logits.detach().requires_grad_()
        logprobs, entropies = vocab_parallel_logprobs(leaf, labels, vocab_size=LOCAL_VOCAB, entropy=entropy != "none")
        loss = (logprobs * weight).sum()
        if entropies is not None and entropy == "gradient":
            loss = loss + (entropies * weight).sum()
        loss.backward()

    def plain(step: int = 27) -> None:  # the chunk of vocab_parallel_logprobs on CPU
        grad = torch.empty_like(logits)
        for begin in range(0, tokens, step):
            part = slice(begin, begin + step)
            leaf = logits[part].detach().requires_grad_()
            (F.cross_entropy(leaf.float(), labels[part], reduction="none") * weight[part]).sum().backward()
            grad[part] = leaf.grad

    ours()
    plain()
    pairs = [(seconds(ours), seconds(plain)) for _ in range(ROUNDS)]
    extra = peak_extra_bytes(ours)
    return {
        "benchmark": "logprob",
        "dtype": str(dtype).removeprefix("torch."),
        "entropy": entropy,
        "tokens": tokens,
        "local_vocab": LOCAL_VOCAB,
        "seconds": round(statistics.median(pair[0] for pair in pairs), 3),
        "time_ratio": round(statistics.median(pair[0] / pair[1] for pair in pairs), 3),
        "time_ratio_target": 1.25,
        "memory_ratio": round(extra / (logits.numel() * logits.element_size()), 3),
        "memory_ratio_target": 1.3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    for dtype in (torch.bfloat16, torch.float32):
        for entropy in ("none", "value", "gradient"):
            print(json.dumps(measure(dtype, tokens, entropy)), flush=True)


if __name__ == "__main__":
    main()
