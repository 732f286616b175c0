"""avg@k, pass@k and maj@k of graded responses, lengths and truncation: pure functions of the records.

A record is a plain mapping, one a response: ``prompt_id``, ``sample_index``, ``source``, ``correct``, ``error`` (None, or the reason
why there is no verdict), ``finish_reason``, ``prompt_length``, ``response_length``, ``subsets`` (field -> value), and ``answer`` (the
extracted answer in a normal spelling, None if the response gives none) if the verifier knows what an answer is. Problems are
identified by ``prompt_id`` alone, never by their text.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vapo_mcore.evaluation.intervals import Estimate, estimate

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens, EOS included; ``right`` and ``wrong`` are the means by verdict, None without such a response."""

    mean: float
    median: float
    p90: float
    max: int
    right: float | None
    wrong: float | None


@dataclass(frozen=True)
class Summary:
    """One set of problems, or a part of it.

    Attributes:
        name: of the set, or the value of the field that the part is made by.
        samples: k, the responses asked for a problem.
        problems, responses: how many there are.
        failed: responses without a verdict, which enter no score.
        causes: how many of them there are of each cause (``config.verifiers.UNGRADED``).
        scores: ``avg@k``, ``pass@j`` for j = 2, 4, 8, ... and k, ``maj@k``; None where undefined.
        lengths, truncated: of all responses; ``truncated`` is the share cut by the length limit, ``truncated_right`` the share of
            those that were right all the same (None without any).
        prompt_tokens, response_tokens: totals; a prompt counts once.
        parts: field -> one summary for each of its values.
    """

    name: str
    samples: int
    problems: int
    responses: int
    failed: int
    causes: dict[str, int]
    scores: dict[str, Estimate | None]
    lengths: Lengths
    truncated: float
    truncated_right: float | None
    prompt_tokens: int
    response_tokens: int
    parts: dict[str, list[Summary]]

    @property
    def average(self) -> Estimate | None:
        """avg@k."""
        return self.scores[f"avg@{self.samples}"]


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples is right (Chen et al. 2021, arXiv 2107.03374, Eq. 1).

    1 - C(n - c, k) / C(n, k) for ``right`` = c of ``samples`` = n, as the product of (1 - k / i) for i = n - c + 1 .. n.

    Raises:
        ValueError: k above n, or c outside [0, n].
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {right} right among {samples} samples is not defined")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def majority_score(answers: Iterable[tuple[bool, str | None]]) -> float:
    """maj@k of one problem from its (correct, answer) pairs: 1 if most votes are right, 0 if not; a tie is decided by chance, and
    counts as its expectation (one right answer among t leading ones: 1 / t).

    All correct responses answer the same, whatever their spelling. Others answer the same where their normal spelling is the same. A
    response without an answer has no vote; without any vote the score is 0.
    """
    votes: dict[tuple[bool, str | None], int] = {}
    for correct, answer in answers:
        if correct or answer is not None:
            key = (True, None) if correct else (False, answer)
            votes[key] = votes.get(key, 0) + 1
    if not votes:
        return 0.0
    most = max(votes.values())
    leading = [correct for (correct, _), count in votes.items() if count == most]
    return leading.count(True) / len(leading)


def summarise(records: Sequence[Record], samples: int, seed: int) -> list[Summary]:
    """Return one summary per set, in the order of their first records; ``seed`` is that of the bootstrap."""
    by_source: dict[str, list[Record]] = {}
    for record in records:
        by_source.setdefault(record["source"], []).append(record)
    return [_summary(name, mine, samples, seed, name, with_parts=True) for name, mine in by_source.items()]


def _summary(name: str, records: list[Record], samples: int, seed: int, place: str, *, with_parts: bool) -> Summary:
    problems: dict[str, list[Record]] = {}
    for record in records:
        problems.setdefault(record["prompt_id"], []).append(record)
    cut = [record for record in records if record["finish_reason"] == "length"]
    return Summary(
        name=name,
        samples=samples,
        problems=len(problems),
        responses=len(records),
        failed=sum(record["error"] is not None for record in records),
        causes=dict(sorted(Counter(record["ungraded"] for record in records if record["error"] is not None).items())),
        scores=_scores(list(problems.values()), samples, [seed, zlib.crc32(place.encode())]),
        lengths=_lengths(records),
        truncated=len(cut) / len(records),
        truncated_right=sum(record["correct"] for record in cut) / len(cut) if cut else None,
        prompt_tokens=sum(mine[0]["prompt_length"] for mine in problems.values()),
        response_tokens=sum(record["response_length"] for record in records),
        parts=_parts(records, samples, seed, place) if with_parts else {},
    )


def _parts(records: list[Record], samples: int, seed: int, place: str) -> dict[str, list[Summary]]:
    parts: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        for field, value in record["subsets"].items():
            parts.setdefault(field, {}).setdefault(value, []).append(record)
    return {
        field: [
            _summary(value, mine, samples, seed, f"{place}/{field}/{value}", with_parts=False)
            for value, mine in sorted(values.items(), key=lambda item: _natural(item[0]))
        ]
        for field, values in parts.items()
    }


def _natural(value: str) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


def _scores(problems: list[list[Record]], samples: int, seed: list[int]) -> dict[str, Estimate | None]:
    graded = [[record for record in mine if record["error"] is None] for mine in problems]
    counts = [(len(mine), sum(record["correct"] for record in mine)) for mine in graded]

    def mean_of(values: list[float]) -> Estimate | None:
        return estimate(np.array(values, dtype=np.float64), seed)

    scores = {f"avg@{samples}": mean_of([right / count for count, right in counts if count])}
    if samples == 1:
        return scores
    sizes = sorted({2**power for power in range(1, samples.bit_length()) if 2**power <= samples} | {samples})
    for size in sizes:
        scores[f"pass@{size}"] = mean_of([pass_at_k(count, right, size) for count, right in counts if count >= size])
    scores[f"maj@{samples}"] = None
    if all("answer" in record for mine in graded for record in mine):
        votes = [[(bool(record["correct"]), record["answer"]) for record in mine] for mine in graded if mine]
        scores[f"maj@{samples}"] = mean_of([majority_score(mine) for mine in votes])
    return scores


def _lengths(records: list[Record]) -> Lengths:
    lengths = np.array([record["response_length"] for record in records], dtype=np.int64)
    graded = np.array([record["error"] is None for record in records])
    right = np.array([bool(record["correct"]) for record in records])
    wrong = graded & ~right
    return Lengths(
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
        p90=float(np.percentile(lengths, 90)),
        max=int(lengths.max()),
        right=float(lengths[right].mean()) if right.any() else None,
        wrong=float(lengths[wrong].mean()) if wrong.any() else None,
    )
