"""Measure packing and data-parallel balance of one rollout: ``python benchmarks/packing.py`` prints one JSON line per case.

Lengths are lognormal with mean 4k, limited by the 32k cap. ``fill``: real tokens over cap x non-empty micro-batches. ``imbalance``: max /
mean over the data-parallel ranks in the worst mini-batch. ``seconds``: median of the repeats, after one call that compiles.
"""

import argparse
import json
import statistics
import time

import numpy as np

from vapo_mcore.data.packing import schedule

CAP = 32768
COST_RATIO = 1 / (12 * 5120)  # causal attention against dense work at hidden size 5120 (a 32B model)


def lognormal_lengths(rows: int, mean: float, sigma: float, seed: int) -> np.ndarray:
    """Draw ``rows`` lengths; ``mean`` applies before the cap."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)
    return np.clip(np.ceil(drawn), 1, CAP).astype(np.int64)


def measure(lengths: np.ndarray, minibatch_size: int, dp_size: int, repeats: int) -> dict[str, float]:
    """Schedule ``lengths`` and compute all statistics from the scheduled row numbers."""
    seconds = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        result = schedule(lengths, minibatch_size, dp_size, CAP, seed=repeat, attention_cost_ratio=COST_RATIO)
        seconds.append(time.perf_counter() - start)
    cost = lengths + COST_RATIO * lengths.astype(np.float64) ** 2
    bins = [b for m in result.minibatches for rank in m.microbatches for b in rank if b]
    worst = {"tokens": 1.0, "cost": 1.0}
    for minibatch in result.minibatches:
        for name, of in (("tokens", lengths), ("cost", cost)):
            loads = [sum(of[b].sum() for b in rank if b) for rank in minibatch.microbatches]
            worst[name] = max(worst[name], max(loads) / (sum(loads) / len(loads)))
    return {
        "fill": round(float(lengths.sum() / (len(bins) * CAP)), 5),
        "largest_microbatch": max(int(lengths[b].sum()) for b in bins),
        "imbalance_tokens": round(float(worst["tokens"]), 5),
        "imbalance_cost": round(float(worst["cost"]), 5),
        "microbatches_per_rank": sum(m.num_microbatches for m in result.minibatches),
        "seconds": round(statistics.median(seconds[1:]), 4),
        "seconds_max": round(max(seconds[1:]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seeds", type=int, default=3, help="different sets of lengths")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        lengths = lognormal_lengths(arguments.rows, mean=4096, sigma=1.0, seed=seed)
        for minibatch_size, dp_size in ((arguments.rows, 1), (arguments.rows, 16), (512, 16)):
            case = {"benchmark": "packing", "rows": arguments.rows, "minibatch_size": minibatch_size, "dp": dp_size, "lengths_seed": seed}
            print(json.dumps(case | measure(lengths, minibatch_size, dp_size, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
