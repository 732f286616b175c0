"""Measure verdicts per second of the verifier pool. Prints one JSON object per line.

    python benchmarks/verdicts.py [--workers 2] [--integers 20000] [--latex 2000] [--repeats 3]

All answers differ, so the cache never hits (in training it does: responses of a group share answers).

- ``integer``: plain integers, half of them right.
- ``fraction``: LaTeX fractions, reduced or not, half of them right. Like integers they are compared without math-verify.
- ``latex``: roots, polynomials, sets, intervals, multiples of pi and equations, which need math-verify. Four responses per ground truth:
  the right answer in the truth's spelling and in another one, and two wrong answers.
- ``chain_sum``: reasoning-gym entries graded by their scorer.

Starting workers and importing verifiers is not timed. ``verdicts_per_second``: best of the repeats, wall clock.
``verifier_ms_per_verdict``: mean wall-clock time inside the verifier. ``verifier_cpu_ms_per_verdict``: its CPU time, which depends less on
other load (400 responses, in this process). ``load_average``: load of the machine over the previous minute.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable

import reasoning_gym

from vapo_mcore.rewards import GradeItem, VerifierPool
from vapo_mcore.rewards.registry import load_verifier


def integers(rng: random.Random, count: int) -> list[GradeItem]:
    sums = [rng.randint(-(10**8), 10**8) for _ in range(count)]
    return [GradeItem("math", rf"Adding up gives \boxed{{{total + n % 2}}}.", str(total)) for n, total in enumerate(sums)]


def fractions(rng: random.Random, count: int) -> list[GradeItem]:
    items = []
    for n in range(count):
        a, b, factor = rng.randint(1, 10**5), rng.randint(2, 10**5), rng.randint(1, 3)
        items.append(GradeItem("math", rf"so \boxed{{\frac{{{factor * a}}}{{{factor * b + n % 2}}}}}", rf"\frac{{{a}}}{{{b}}}"))
    return items


# Two spellings each; the first is that of the ground truth.
SPELLINGS: list[tuple[Callable[[int, int], str], Callable[[int, int], str]]] = [
    (lambda a, b: rf"{a}\sqrt{{{b}}}", lambda a, b: rf"\sqrt{{{b}}} \cdot {a}"),
    (lambda a, b: f"x^2+{a}x+{b}", lambda a, b: f"x(x+{a})+{b}"),
    (lambda a, b: rf"\{{{a},{a + b}\}}", lambda a, b: f"{a + b}, {a}"),
    (lambda a, b: f"[{a},{a + b})", lambda a, b: rf"\left[{a}, {a}+{b}\right)"),
    (lambda a, b: rf"\frac{{{a}\pi}}{{{b}}}", lambda a, b: rf"{a}\pi/{b}"),
    (lambda a, b: f"y={a}x+{b}", lambda a, b: f"y = {b} + {a}x"),
]


def latex(rng: random.Random, count: int) -> list[GradeItem]:
    items = []
    for group in range(count // 4):
        first, second = SPELLINGS[group % len(SPELLINGS)]
        a, b = rng.randint(2, 10**5), rng.randint(2, 10**5)
        answers = [first(a, b), second(a, b), first(a + 1, b), second(a, b + 7)]
        items += [GradeItem("math", rf"so \boxed{{{answer}}}", first(a, b)) for answer in answers]
    return items


def chain_sums(rng: random.Random, count: int) -> list[GradeItem]:
    items = []
    for n, entry in enumerate(reasoning_gym.create_dataset("chain_sum", size=count, seed=rng.randint(0, 10**6))):
        answer = entry["answer"] if n % 2 else str(int(entry["answer"]) + 1)
        items.append(GradeItem("reasoning_gym", f"It is <answer>{answer}</answer>", entry["answer"], entry["metadata"]))
    return items


def measure(kind: str, items: list[list[GradeItem]], workers: int) -> dict[str, object]:
    best, right, graded = float("inf"), 0, 0
    load = os.getloadavg()[0]
    with VerifierPool(workers, 60.0) as pool:
        pool.load([items[0][0].verifier])
        for batch in items:
            start = time.perf_counter()
            verdicts = pool.grade(batch)
            best = min(best, (time.perf_counter() - start) / len(batch))
            right += sum(verdict.correct for verdict in verdicts)
        stats = pool.stats
        graded = stats.graded
        if stats.errors:
            raise SystemExit(f"{kind}: {stats.errors} responses without a verdict: {next(v.error for v in verdicts if v.error)}")
    total = sum(map(len, items))
    sample = items[0][:400]
    score = load_verifier(sample[0].verifier).score
    cpu = time.process_time()
    for item in sample:
        score(item.response, item.ground_truth, item.metadata)
    cpu = (time.process_time() - cpu) / len(sample)
    return {
        "benchmark": "verdicts",
        "kind": kind,
        "workers": workers,
        "cpus": os.cpu_count(),
        "load_average": round(load, 1),
        "verdicts_per_second": round(1 / best),
        "verifier_ms_per_verdict": round(1e3 * stats.seconds / graded, 3),
        "verifier_cpu_ms_per_verdict": round(1e3 * cpu, 3),
        "not_from_cache": round(graded / total, 3),
        "right": round(right / total, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--integers", type=int, default=20_000, help="integer, fraction and chain_sum verdicts per repeat")
    parser.add_argument("--latex", type=int, default=2_000, help="latex verdicts per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rng = random.Random(0)
    kinds: list[tuple[str, Callable[[random.Random, int], list[GradeItem]], int]] = [
        ("integer", integers, options.integers),
        ("fraction", fractions, options.integers),
        ("latex", latex, options.latex),
        ("chain_sum", chain_sums, options.integers),
    ]
    for kind, make, count in kinds:
        print(json.dumps(measure(kind, [make(rng, count) for _ in range(options.repeats)], options.workers)), flush=True)


if __name__ == "__main__":
    main()
