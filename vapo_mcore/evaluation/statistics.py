"""Compute avg@k, pass@k and maj@k of graded responses, lengths and truncation: pure functions of the records.

A record is a plain mapping, one per response: ``prompt_id``, ``sample_index``, ``source``, ``correct``, ``error`` (None, or the reason
why there is no verdict), ``finish_reason``, ``prompt_length``, ``response_length``, ``subsets`` (field -> value), and ``answer`` (the
normalised extracted answer, None if the response gives none) if the verifier extracts answers. Problems are
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
        name: name of the set, or value of the field that defines the part.
        samples: k, the number of responses per problem.
        problems, responses: their numbers.
        failed: responses without a verdict, which enter no score.
        causes: number of them by cause (``config.verifiers.UNGRADED``).
        scores: ``avg@k``, ``pass@j`` for j = 2, 4, 8, ... and k, ``maj@k``; None where undefined.
        lengths: of all responses.
        truncated: share of responses truncated by the length limit.
        truncated_right: share of the truncated responses that are correct nevertheless; None if none is truncated.
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
    """Return the unbiased estimate of the probability that at least one of ``k`` samples is right (arXiv:2107.03374, Eq. 1).

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
    """Return maj@k of one problem from its (correct, answer) pairs: 1 if the majority is right, else 0; 1 / t if it ties with t - 1 others.

    All correct responses count as one answer, however it is written. Wrong answers are equal if their normalised forms are equal. A
    response without an answer has no vote. Without votes the score is 0.
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
    """Return one summary per set, in the order of their first records. ``seed`` seeds the bootstrap."""
    by_source: dict[str, list[Record]] = {}
    for record in records:
        by_source.setdefault(record["source"], []).append(record)
    return [_summary(name, mine, samples, seed, name, with_parts=True) for name, mine in by_source.items()]


def _summary(name: str, records: list[Record], samples: int, seed: int, place: str, *, with_parts: bool) -> Summary:
    problems: dict[str, list[Record]] = {}
    for record in records:
        problems.setdefault(record["prompt_id"], []).append(record)
    truncated = [record for record in records if record["finish_reason"] == "length"]
    return Summary(
        name=name,
        samples=samples,
        problems=len(problems),
        responses=len(records),
        failed=sum(record["error"] is not None for record in records),
        causes=dict(sorted(Counter(record["ungraded"] for record in records if record["error"] is not None).items())),
        scores=_scores(list(problems.values()), samples, [seed, zlib.crc32(place.encode())]),
        lengths=_lengths(records),
        truncated=len(truncated) / len(records),
        truncated_right=sum(record["correct"] for record in truncated) / len(truncated) if truncated else None,
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
    """Return a sort key that puts numbers first, by value, then texts."""
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
