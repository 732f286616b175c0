"""Simulate how long rollout replicas wait for long responses, with and without a token budget per response and step (a horizon).

    python benchmarks/horizon.py [--replicas 32] [--slots 256] [--mean 6000] [--sigma 1.0] [--cap 20480] [--steps 40] [--seed 0]

A discrete-event simulation, no model runs. Prints one JSON object per case. In a step without a horizon every response runs to its end.
With a horizon H every open response gets at most H new tokens in a step; unfinished ones continue in the next step, and new responses
replace the finished ones. ``waves``: open responses per engine slot (1: all run at once; 2: the second half waits for free slots).

Responses stay on their replica but for the trainer's swaps (``vapo_mcore.experience.balance``), and start oldest first.

Reported, as means over the last half of the steps:

- ``idle_replicas``: share of replica time between a replica's last token and the end of the step's slowest replica;
- ``empty_slots``: share of slot time without a running response; includes ``idle_replicas``;
- ``prefill``: share of replica time spent on prefills; ``reprefilled``, ``moved``: tokens that are prefilled again, and that
  move to another replica, per sampled token;
- ``tokens_per_step``, and ``tokens_per_second``: sampled tokens per second and replica; ``speedup``: over the case without a horizon of
  as many waves; ``cache_gib``: largest key-value cache of a replica;
- ``estimated``: the first three, ``step_s`` and ``tokens_per_second`` by the closed formulas of ``vapo-mcore plan --horizon``.

Assumptions: a dense model of Qwen2.5-32B's shape in bfloat16, TP 8 on H100 with the rates of ``vapo_mcore.planning.devices``; lognormal
lengths that do not depend on the prompt, with the mean before the cap; prompts of 512 tokens; the key-value cache holds all running
responses (``cache_gib`` is what this takes); weights change every step, so a continued response is prefilled again; only sampling is timed.
"""

import argparse
import heapq
import json
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vapo_mcore.experience.balance import balanced
from vapo_mcore.planning.devices import DEVICES
from vapo_mcore.planning.waiting import Lengths as LengthsOfPlan
from vapo_mcore.planning.waiting import Replicas, estimate_waiting

PARAMETERS, LAYERS, KV_BYTES_PER_TOKEN, TENSOR_PARALLEL = 32.5e9, 64, 64 * 2 * 8 * 128 * 2, 8
PROMPT_TOKENS = 512
HORIZONS = (None, 20_480, 8_192, 4_096, 2_048)


class Engine:
    """Seconds of decoding and prefilling on one replica."""

    def __init__(self) -> None:
        device = DEVICES["h100"]
        rate = TENSOR_PARALLEL * device.memory_rate * device.memory_efficiency
        self.weights = 2 * PARAMETERS / rate
        self.latency = device.decode_overhead + 2 * LAYERS * device.layer_latency
        self.cached_token = KV_BYTES_PER_TOKEN / rate
        self.computed_token = 2 * PARAMETERS / (TENSOR_PARALLEL * device.flops * device.forward_efficiency)

    def decode(self, running: int, cached: int, steps: int) -> float:
        """Return the seconds of ``steps`` engine steps with ``running`` responses, which have ``cached`` tokens at the start."""
        weights = steps * max(self.weights, running * self.computed_token)
        return weights + steps * self.latency + self.cached_token * (steps * cached + running * steps * (steps - 1) / 2)

    def prefill(self, tokens: int) -> float:
        return tokens * self.computed_token


@dataclass(frozen=True)
class ReplicaTimes:
    """Result of a replica's step.

    ``seconds``: until its last token; ``prefill``: seconds of prefills; ``slot_seconds``: running responses, integrated over time;
    ``cached``: peak of cached tokens.
    """

    seconds: float
    prefill: float
    slot_seconds: float
    cached: int


def run_replica(engine: Engine, work: list[tuple[int, int]], slots: int) -> ReplicaTimes:
    """Simulate one step of a replica. ``work``: (tokens so far, tokens to sample) of its responses, in the order in which they start."""
    running: list[tuple[int, int]] = []  # (engine step of the last token, tokens then cached)
    clock, now, cached, waiting, peak = 0, 0.0, 0, 0, 0
    prefill = slot_seconds = 0.0
    while waiting < len(work) or running:
        admitted = 0
        while waiting < len(work) and len(running) < slots:
            before, tokens = work[waiting]
            heapq.heappush(running, (clock + tokens, PROMPT_TOKENS + before + tokens))
            admitted += PROMPT_TOKENS + before
            waiting += 1
        cached += admitted
        spent = engine.prefill(admitted)
        steps = running[0][0] - clock
        seconds = engine.decode(len(running), cached, steps)
        prefill += spent
        slot_seconds += len(running) * (spent + seconds)
        now += spent + seconds
        cached += len(running) * steps
        clock += steps
        peak = max(peak, cached)
        while running and running[0][0] == clock:
            cached -= heapq.heappop(running)[1]
    return ReplicaTimes(now, prefill, slot_seconds, peak)


class Lengths:
    """Response lengths."""

    def __init__(self, mean: float, sigma: float, cap: int, seed: int) -> None:
        self.parameters, self.cap = (math.log(mean) - sigma**2 / 2, sigma), cap
        self.rng = np.random.default_rng(seed)

    def draw(self, count: int) -> NDArray[np.int64]:
        return np.minimum(np.ceil(self.rng.lognormal(*self.parameters, count)), self.cap).astype(np.int64)


def placed(places: NDArray[np.int64], done: NDArray[np.int64], most: NDArray[np.int64], replicas: int) -> NDArray[np.int64]:
    """Place the responses as the trainer does: new ones on the replicas that have the fewest, then swaps that even out the work.

    ``places``: of each response, or -1 if it is new; ``most``: most tokens that it may get in this step.
    """
    held = np.bincount(places[places >= 0], minlength=replicas)
    result = places.copy()
    result[places < 0] = np.repeat(np.arange(replicas), len(places) // replicas - held)
    if not done.any():
        return result
    work = most * (2 * (PROMPT_TOKENS + done) + most)
    return np.array(balanced(result.tolist(), work.tolist(), replicas))


def simulate(args: argparse.Namespace, waves: int, horizon: int | None) -> dict[str, float]:
    """Simulate the steps of one case and return the reported shares."""
    engine, lengths = Engine(), Lengths(args.mean, args.sigma, args.cap, args.seed)
    budget = args.cap if horizon is None else horizon
    total = lengths.draw(args.replicas * args.slots * waves)
    done = np.zeros_like(total)
    places = np.full_like(total, -1)
    time = busy = slot_time = prefills = 0.0
    sampled = reprefilled = cached = moved = 0
    for step in range(args.steps):
        tokens = np.minimum(total - done, budget)
        before, places = places, placed(places, done, np.minimum(args.cap - done, budget), args.replicas)
        oldest = np.argsort(-done, kind="stable")
        parts = [oldest[places[oldest] == replica] for replica in range(args.replicas)]
        times = [run_replica(engine, [(int(done[i]), int(tokens[i])) for i in part], args.slots) for part in parts]
        if step >= args.steps // 2:
            time += max(replica.seconds for replica in times)
            busy += sum(replica.seconds for replica in times) / args.replicas
            slot_time += sum(replica.slot_seconds for replica in times) / (args.replicas * args.slots)
            prefills += sum(replica.prefill for replica in times) / args.replicas
            cached = max(cached, *(replica.cached for replica in times))
            sampled += int(tokens.sum())
            reprefilled += int((done + PROMPT_TOKENS)[done > 0].sum())
            moved += int(done[(places != before) & (before >= 0)].sum())
        done = done + tokens
        ended = done == total
        total[ended], done[ended], places[ended] = lengths.draw(int(ended.sum())), 0, -1
    shares = {"idle_replicas": 1 - busy / time, "empty_slots": 1 - slot_time / time, "prefill": prefills / time}
    measured = args.steps - args.steps // 2
    shares |= {
        "reprefilled": reprefilled / sampled,
        "moved": moved / sampled,
        "step_s": time / measured,
        "cache_gib": cached * KV_BYTES_PER_TOKEN / 2**30,
    }
    rates = {"tokens_per_step": round(sampled / measured), "tokens_per_second": round(sampled / time / args.replicas, 1)}
    return {**{name: round(value, 3) for name, value in shares.items()}, **rates}


def estimate(args: argparse.Namespace, waves: int, horizon: int | None) -> dict[str, float]:
    """Return the closed estimate of one case, with the rates of the simulated engine."""
    engine = Engine()

    def step_seconds(running: NDArray[np.float64], cached: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (
            np.maximum(engine.weights, running * engine.computed_token) + engine.latency + cached * engine.cached_token
        )
        return found

    lengths = LengthsOfPlan.lognormal(args.mean, args.sigma, args.cap)
    replicas = Replicas(
        args.replicas, args.slots * waves, args.slots, PROMPT_TOKENS, step_seconds, lambda tokens: tokens * engine.computed_token
    )
    found = estimate_waiting(lengths, replicas, horizon)
    shares = {"idle_replicas": found.idle, "empty_slots": found.empty, "prefill": found.prefill, "step_s": found.seconds}
    return {**{name: round(value, 3) for name, value in shares.items()}, "tokens_per_second": round(found.tokens_per_second, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--mean", type=float, default=6000.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--cap", type=int, default=20_480)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for waves in (1, 2, 4):
        plain = 0.0
        for horizon in HORIZONS:
            result = simulate(args, waves, horizon)
            plain = plain or result["tokens_per_second"]
            line = {"benchmark": "horizon", "waves": waves, "horizon": horizon, **result}
            line |= {"speedup": round(result["tokens_per_second"] / plain, 3), "estimated": estimate(args, waves, horizon)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
