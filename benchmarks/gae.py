"""Compare packed decoupled GAE with a memcpy and with a padded loop over time steps. Prints one JSON object per line.

    python benchmarks/gae.py [--responses 8192] [--mean 2000] [--cap 8000] [--sigma 1.0] [--repeats 9] [--skip-padded]

Timed in one process on the same tensors:

- ``packed_gae_decoupled``: the public function, both lambdas in one pass, one lambda_policy per response, including argument checks and
  the allocation of the outputs.
- ``memcpy``: ``Tensor.copy_`` of the bytes that GAE must move, 17 per token: rewards, values and mask are read (4 + 4 + 1), advantages and
  returns written (4 + 4). A copy of k bytes reads k and writes k, so its buffers have half of that.
- ``whiten``: the public function on the values, against the same copy: it reads values and mask once for the moments and once more to
  write the result (14 bytes a token).
- ``padded_loop``: rewards, values and mask as [responses, longest]; two recurrences of torch operations on columns, one time step after
  the other. Padding is not timed; the loop runs once (seconds). Its result is compared with the packed one.

Lengths are lognormal with the given mean and sigma, rounded up and limited by the cap. Reports medians of ``repeats`` after one warm-up, as
wall-clock time (for the targets) and as CPU time, which depends less on other load.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vapo_mcore.algorithm.advantages import length_adaptive_lambda, packed_gae_decoupled, whiten

BYTES_PER_TOKEN = 17


def padded_loop(rewards: Tensor, values: Tensor, mask: Tensor, lam_policy: Tensor, lam_critic: float) -> tuple[Tensor, Tensor]:
    """Compute decoupled GAE with gamma 1 on padded [B, T] tensors; masked positions carry the recurrence forward."""
    batch, steps = rewards.shape
    next_value = torch.zeros(batch)
    policy, critic = torch.zeros(batch), torch.zeros(batch)
    advantages, targets = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for t in range(steps - 1, -1, -1):
        here = mask[:, t]
        delta = rewards[:, t] + next_value - values[:, t]
        policy = torch.where(here, delta + lam_policy * policy, policy)
        critic = torch.where(here, delta + lam_critic * critic, critic)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = policy
        targets[:, t] = critic + values[:, t]
    return advantages * mask, targets * mask


@dataclass(frozen=True)
class Times:
    wall: list[float]
    cpu: list[float]


def measure(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Measure wall and CPU seconds (all threads) of each function, in turns so that other load affects all of them equally."""
    times = {name: Times([], []) for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            function()
            times[name].wall.append(time.perf_counter() - wall)
            times[name].cpu.append(time.process_time() - cpu)
    return times


def ratio(one: Times, other: Times) -> tuple[float, float]:
    """Return the ratios of the medians of ``one`` and ``other``, for wall and CPU time."""
    return statistics.median(one.wall) / statistics.median(other.wall), statistics.median(one.cpu) / statistics.median(other.cpu)


def report(name: str, times: Times, tokens: int, **more: object) -> None:
    wall, cpu = statistics.median(times.wall), statistics.median(times.cpu)
    line = {
        "benchmark": "gae",
        "case": name,
        "wall_s": round(wall, 6),
        "cpu_s": round(cpu, 6),
        "ns_per_token": round(wall / tokens * 1e9, 3),
    }
    print(json.dumps({**line, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--mean", type=float, default=2000.0)
    parser.add_argument("--cap", type=int, default=8000)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--skip-padded", action="store_true")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    drawn = rng.lognormal(math.log(args.mean) - args.sigma**2 / 2, args.sigma, args.responses)
    lengths = torch.from_numpy(np.minimum(np.ceil(drawn), args.cap).astype(np.int64))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(cu_seqlens[-1])
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(tokens, generator=generator)
    mask = torch.ones(tokens, dtype=torch.bool)
    rewards = torch.zeros(tokens)
    rewards[cu_seqlens[1:] - 1] = torch.bernoulli(torch.full((args.responses,), 0.5), generator=generator)
    lam_policy = length_adaptive_lambda(lengths, alpha=0.05)

    start = time.perf_counter()
    packed_gae_decoupled(rewards[:1], values[:1], mask[:1], torch.tensor([0, 1]), 0.95, 1.0)
    compiled = time.perf_counter() - start
    drawn_lengths = {"responses": args.responses, "tokens": tokens, "mean": round(tokens / args.responses, 1), "max": int(lengths.max())}
    settings = {**drawn_lengths, "sigma": args.sigma, "threads": torch.get_num_threads(), "first_call_s": round(compiled, 3)}
    print(json.dumps({"benchmark": "gae", "case": "setup", **settings}), flush=True)

    source = torch.ones(tokens * BYTES_PER_TOKEN // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    cases: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source),
        "packed_gae_decoupled": lambda: packed_gae_decoupled(rewards, values, mask, cu_seqlens, lam_policy, 1.0),
        "whiten": lambda: whiten(values, mask),
    }
    measure(cases, 1)  # warm-up
    times = measure(cases, args.repeats)
    packed = times["packed_gae_decoupled"]
    report("memcpy", times["memcpy"], tokens)
    wall, cpu = ratio(packed, times["memcpy"])
    report("packed_gae_decoupled", packed, tokens, times_memcpy=round(wall, 2), times_memcpy_cpu=round(cpu, 2), target_times_memcpy=6)
    wall, cpu = ratio(times["whiten"], times["memcpy"])
    report("whiten", times["whiten"], tokens, times_memcpy=round(wall, 2), times_memcpy_cpu=round(cpu, 2))
    if args.skip_padded:
        return

    width = int(lengths.max())
    valid = torch.arange(width)[None, :] < lengths[:, None]
    padded_rewards = torch.zeros(args.responses, width).masked_scatter_(valid, rewards)
    padded_values = torch.zeros(args.responses, width).masked_scatter_(valid, values)
    result: list[tuple[Tensor, Tensor]] = []
    loop = measure({"padded": lambda: result.append(padded_loop(padded_rewards, padded_values, valid, lam_policy.float(), 1.0))}, 1)[
        "padded"
    ]
    expected = packed_gae_decoupled(rewards, values, mask, cu_seqlens, lam_policy, 1.0)
    difference = max(float((got[valid] - want).abs().max()) for got, want in zip(result[0], expected, strict=True))
    wall, cpu = ratio(loop, packed)
    faster = {"packed_is_faster_by": round(wall, 1), "packed_is_faster_by_cpu": round(cpu, 1), "target_faster_by": 150}
    report("padded_loop", loop, tokens, **faster, max_difference=round(difference, 6))


if __name__ == "__main__":
    main()
