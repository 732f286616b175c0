"""Compute the data of the charts: bucketed curves, evaluations, distributions by window, seconds by phase. Values are rounded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vapo_mcore.metrics_file import Row
from vapo_mcore.report.read import rows_of

MOST_POINTS = 500
"""Maximum points of a curve; with more steps, each point is a bucket of consecutive steps."""
WINDOWS = {"value_pretraining": 4, "rl": 16}
"""Maximum number of windows of consecutive steps per stage; distributions are shown per window."""
HISTOGRAMS = (
    "gae/lambda_histogram",
    "groups/accuracy_histogram",
    "response/length_histogram",
    "horizon/segments_histogram",
    "horizon/staleness_histogram",
)
PROFILES = ("position", "length", "prediction", "cut")
_EVALUATION = re.compile(r"eval/(?P<name>.+)/avg@(?P<samples>\d+)")
_NOT_A_CURVE = {"step"}
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One evaluation: ``step`` of the RL stage (0: before training), accuracy, and the bounds of its interval."""

    step: int
    accuracy: float
    low: float
    high: float


def evaluations(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Map ``"<set> avg@k"`` to its evaluations, sorted by step."""
    result: dict[str, list[Point]] = {}
    for row in rows:
        for key, accuracy in row.items():
            match = _EVALUATION.fullmatch(key)
            if match is None or accuracy is None:
                continue
            low, high = (row.get(f"eval/{match['name']}/{end}") for end in ("ci_low", "ci_high"))
            point = Point(row["step"], accuracy, accuracy if low is None else low, accuracy if high is None else high)
            result.setdefault(f"{match['name']} avg@{match['samples']}", []).append(point)
    return result


def rounded(value: float | None) -> float | int | None:
    """Round to 5 significant digits; None if not finite. Whole numbers become integers, which are shorter in JSON."""
    if value is None or not np.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def curves(rows: Sequence[Row]) -> dict[str, Any]:
    """Return every numeric metric of a run over its steps, in at most ``MOST_POINTS`` buckets of consecutive steps.

    x is the step of the RL stage. Step k of P value-pretraining steps is at k - P - 1, so that RL starts at the same x in all runs.

    Returns: ``x`` (middle of each bucket), ``first`` and ``last`` (its steps), ``mean`` by metric (over the steps in which it is a
        number, None in a bucket without any), ``low`` and ``high`` where buckets have several steps, and ``undefined`` (steps in which
        the metric is null, by metric, where there are any).
    """
    pretraining, rl = rows_of(rows, "value_pretraining"), rows_of(rows, "rl")
    steps = [*pretraining, *rl]
    places = np.array([row["step"] - len(pretraining) - 1 for row in pretraining] + [row["step"] for row in rl], dtype=np.float64)
    edges = _edges(len(pretraining), len(rl))
    starts, ends = edges[:-1], edges[1:]
    result: dict[str, Any] = {
        "x": [rounded(places[a:b].mean()) for a, b in zip(starts, ends, strict=True)],
        "first": [int(places[a]) for a in starts],
        "last": [int(places[b - 1]) for b in ends],
        "mean": {},
        "low": {},
        "high": {},
        "undefined": {},
    }
    for name in _numeric_metrics(steps):
        values = np.array([_number(row.get(name)) for row in steps])
        mean, low, high = _buckets(values, edges)
        result["mean"][name] = [rounded(x) for x in mean]
        if len(steps) > len(starts):
            result["low"][name], result["high"][name] = [rounded(x) for x in low], [rounded(x) for x in high]
        undefined = sum(name in row and row[name] is None for row in steps)
        if undefined:
            result["undefined"][name] = undefined
    return result


def _edges(pretraining: int, rl: int) -> list[int]:
    """Return the bucket boundaries. No bucket contains steps of both stages."""
    total = pretraining + rl
    if total <= MOST_POINTS:
        return list(range(total + 1))
    shares = max(1, MOST_POINTS * pretraining // total) if pretraining else 0
    first = np.linspace(0, pretraining, shares + 1).round().astype(int) if shares else np.array([0])
    second = pretraining + np.linspace(0, rl, MOST_POINTS - shares + 1).round().astype(int)
    return [int(edge) for edge in np.unique(np.concatenate([first, second]))]


def _buckets(values: Numbers, edges: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    """Return mean, minimum and maximum of each bucket; NaN for buckets without numbers."""
    starts = np.asarray(edges[:-1])
    if not len(starts):
        return np.empty(0), np.empty(0), np.empty(0)
    known = ~np.isnan(values)
    count = np.add.reduceat(known.astype(np.float64), starts)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    empty = count == 0
    mean = np.where(empty, np.nan, total / np.maximum(count, 1))
    return mean, np.where(empty, np.nan, low), np.where(empty, np.nan, high)


def _numeric_metrics(rows: Sequence[Row]) -> list[str]:
    """List the metrics that are a number in some row, in order of appearance."""
    found: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_A_CURVE and name not in found and not np.isnan(_number(value)):
                found[name] = None
    return list(found)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def evaluation_curves(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Return ``evaluations`` as plain, rounded values for the page."""
    return {
        name: [{key: rounded(value) for key, value in asdict(point).items()} for point in points]
        for name, points in evaluations(rows).items()
    }


def windows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return distributions over windows of consecutive steps, value pretraining first.

    Each window has ``stage``, ``first`` and ``last`` step, ``histograms`` (counts summed over its steps) and ``profiles``: by ``position``,
    ``length``, ``prediction`` and ``cut``, the means of ``values`` and ``returns`` over all ``tokens`` of its steps, None in empty bins.
    Distributions that no step recorded are absent, and so are those with outdated bins (``other_bins``).
    """
    left_out = other_bins(rows)
    rows = [{name: value for name, value in row.items() if name not in names} for row, names in zip(rows, left_out, strict=True)]
    result = []
    for stage, most in WINDOWS.items():
        steps = rows_of(rows, stage)
        edges = np.linspace(0, len(steps), min(most, len(steps)) + 1).round().astype(int)
        result += [_window(stage, steps[a:b]) for a, b in pairwise(edges)]
    return result


def other_bins(rows: Sequence[Row]) -> list[set[str]]:
    """Return for each row the distributions whose number of bins differs from the last recorded one (after a resume by another version)."""
    names = (*HISTOGRAMS, *(f"critic/tokens_by_{by}" for by in PROFILES))
    bins = {name: len(row[name]) for row in rows for name in names if row.get(name)}
    return [{name for name in names if row.get(name) and len(row[name]) != bins[name]} for row in rows]


def _window(stage: str, rows: Sequence[Row]) -> dict[str, Any]:
    histograms = {}
    for name in HISTOGRAMS:
        counts = [row[name] for row in rows if row.get(name)]
        if counts:
            histograms[name] = [int(count) for count in np.sum(np.asarray(counts), axis=0)]
    profiles = {name: profile for name in PROFILES if (profile := _profile(rows, name))}
    return {"stage": stage, "first": rows[0]["step"], "last": rows[-1]["step"], "histograms": histograms, "profiles": profiles}


def _profile(rows: Sequence[Row], by: str) -> dict[str, Any]:
    recorded = [row for row in rows if row.get(f"critic/tokens_by_{by}")]
    if not recorded:
        return {}
    tokens = np.array([row[f"critic/tokens_by_{by}"] for row in recorded], dtype=np.float64)
    total = tokens.sum(axis=0)
    profile: dict[str, Any] = {"tokens": [int(count) for count in total]}
    for what in ("values", "returns"):
        means = np.array([[0.0 if mean is None else mean for mean in row[f"critic/{what}_by_{by}"]] for row in recorded])
        profile[what] = [rounded(s / n) if n else None for s, n in zip((means * tokens).sum(axis=0), total, strict=True)]
    return profile


_NO_PHASES = ("time/step", "time/eval", "time/run", "time/gpu_hours", "time/generate_mean")
"""Times that are not a phase of a step: the whole step, evaluations, and the run so far."""


def phase_seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Return mean seconds per RL step by phase, or per step of value pretraining if there is no RL step."""
    steps = rows_of(rows, "rl") or rows_of(rows, "value_pretraining")
    totals: dict[str, float] = {}
    for row in steps:
        for name, value in row.items():
            if name.startswith("time/") and name not in _NO_PHASES and value is not None:
                totals[name.removeprefix("time/")] = totals.get(name.removeprefix("time/"), 0.0) + value
    return {name: total / len(steps) for name, total in totals.items()}


def mean_of_ends(rows: Sequence[Row], name: str, count: int) -> tuple[float, float] | None:
    """Return the means of the first and the last ``count`` numbers of a metric in the RL stage; None without numbers."""
    values = [row[name] for row in rows_of(rows, "rl") if row.get(name) is not None]
    return (float(np.mean(values[:count])), float(np.mean(values[-count:]))) if values else None


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten settings to dotted keys; lists are kept as values."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
