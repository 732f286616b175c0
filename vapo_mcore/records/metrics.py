"""Collect the metrics of one step and reduce them over all ranks with the reduction that each metric declares.

A metric is recorded as *slots* (for a mean: numerator and denominator) that are summed over micro-batches and ranks, so that averages of
averages and sums of maxima cannot occur. ``StepMetrics.reduce`` sums the slots over the data-parallel group in one all-reduce, takes
extrema over the world in another, and then computes the final values in float64. ``metric_table.METRICS`` lists all metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

MetricValue = float | str | Sequence[float | None] | Sequence[int] | None


class Reduction(Enum):
    """How a metric is reduced over the ranks, micro-batches and updates of a step."""

    MEAN = "mean"
    STD = "population standard deviation"
    MAX = "maximum"
    MIN = "minimum"
    POOLED = "computed over all tokens of all ranks together"
    REPLICATED = "same on all ranks"


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric. ``over``: the items that are averaged, summed or compared (for example "response tokens")."""

    name: str
    reduction: Reduction
    over: str
    text: str


def _finish_mean(slots: Sequence[float]) -> float | None:
    total, count = slots
    return total / count if count > 0 else None


def _finish_std(slots: Sequence[float]) -> float | None:
    variance = _variance(*slots)
    return None if variance is None else math.sqrt(variance)


def _variance(count: float, first: float, second: float) -> float | None:
    if count <= 0:
        return None
    mean = first / count
    return max(second / count - mean * mean, 0.0)


_SUMMED: dict[Reduction, tuple[int, Callable[[Sequence[float]], float | None]]] = {
    Reduction.MEAN: (2, _finish_mean),
    Reduction.STD: (3, _finish_std),
}
_EXTREMES = (Reduction.MAX, Reduction.MIN)


class StepMetrics:
    """Collects the metrics of one step on one rank. Values are Python numbers or 0-dim tensors, which are read once at the end.

    Ranks may record different subsets (a rank without tokens records nothing): the table fixes the layout of the reduced vectors, so the
    collectives always match.
    """

    def __init__(self, table: Iterable[Metric]) -> None:
        self._table = {metric.name: metric for metric in table}
        self._sums: dict[str, list[float | Tensor]] = {}
        self._extremes: dict[str, float] = {}
        self._final: dict[str, MetricValue] = {}

    def add(self, name: str, *slots: float | Tensor) -> None:
        """Add raw slots to a summed metric: MEAN (sum, count), STD (count, sum, sum of squares)."""
        reduction = self._table[name].reduction
        width = _SUMMED[reduction][0]
        if len(slots) != width:
            raise ValueError(f"metric {name!r} ({reduction.name}) takes {width} slots, got {len(slots)}")
        held = self._sums.setdefault(name, [0.0] * width)
        for index, slot in enumerate(slots):
            value = slot.detach().double() if isinstance(slot, Tensor) else float(slot)
            held[index] = held[index] + value

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add a per-token tensor to a MEAN, STD, MAX or MIN metric; only entries where ``mask`` is True are read."""
        reduction = self._table[name].reduction
        chosen = values[mask].double()
        if reduction in _EXTREMES:
            if chosen.numel():
                self.extreme(name, float(chosen.max() if reduction is Reduction.MAX else chosen.min()))
        elif reduction is Reduction.MEAN:
            self.add(name, chosen.sum(), chosen.numel())
        elif reduction is Reduction.STD:
            self.add(name, chosen.numel(), chosen.sum(), chosen.square().sum())
        else:
            raise ValueError(f"metric {name!r} ({reduction.name}) does not take tokens")

    def extreme(self, name: str, value: float) -> None:
        """Record a candidate for a MAX or MIN metric."""
        larger = self._table[name].reduction is Reduction.MAX
        if self._table[name].reduction not in _EXTREMES:
            raise ValueError(f"metric {name!r} is not an extreme")
        held = self._extremes.get(name)
        self._extremes[name] = value if held is None else (max(held, value) if larger else min(held, value))

    def put(self, name: str, value: MetricValue) -> None:
        """Record a value that is equal on all ranks: from replicated rows, or from a collective over all tokens."""
        if self._table[name].reduction not in (Reduction.POOLED, Reduction.REPLICATED):
            raise ValueError(f"metric {name!r} ({self._table[name].reduction.name}) must be reduced: use add or extreme, not put")
        self._final[name] = value

    def reduce(self, data_parallel_group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> dict[str, MetricValue]:
        """Reduce over all ranks and return the final values in table order, without metrics that no rank recorded. Collective.

        ``data_parallel_group`` None means a single process. Undefined values, such as a mean over no tokens, are None.
        """
        sums, recorded = self._reduce_sums(data_parallel_group, device)
        extremes = self._reduce_extremes(data_parallel_group is not None, device)
        result: dict[str, MetricValue] = {}
        for name, metric in self._table.items():
            if metric.reduction in _SUMMED and name in recorded:
                result[name] = _SUMMED[metric.reduction][1](sums[name])
            elif metric.reduction in _EXTREMES and name in extremes:
                result[name] = extremes[name]
            elif name in self._final:
                result[name] = self._final[name]
        return result

    def _reduce_sums(self, group: dist.ProcessGroup | None, device: torch.device | str) -> tuple[dict[str, list[float]], set[str]]:
        names = [name for name, metric in self._table.items() if metric.reduction in _SUMMED]
        flat: list[float | Tensor] = []
        for name in names:
            held = self._sums.get(name)
            flat.append(0.0 if held is None else 1.0)  # a flag: recorded on some rank
            flat.extend(held if held is not None else [0.0] * _SUMMED[self._table[name].reduction][0])
        vector = _vector(flat, device)
        if group is not None:
            dist.all_reduce(vector, group=group)
        numbers = vector.tolist()
        sums, recorded, cursor = {}, set(), 0
        for name in names:
            width = _SUMMED[self._table[name].reduction][0]
            if numbers[cursor] > 0:
                recorded.add(name)
            sums[name] = numbers[cursor + 1 : cursor + 1 + width]
            cursor += 1 + width
        return sums, recorded

    def _reduce_extremes(self, distributed: bool, device: torch.device | str) -> dict[str, float]:
        names = [name for name, metric in self._table.items() if metric.reduction in _EXTREMES]
        signs = [1.0 if self._table[name].reduction is Reduction.MAX else -1.0 for name in names]
        held = [self._extremes.get(name) for name in names]
        vector = torch.tensor(
            [-math.inf if value is None else sign * value for sign, value in zip(signs, held, strict=True)],
            dtype=torch.float64,
            device=device,
        )
        if distributed:
            dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        found = zip(names, signs, vector.tolist(), strict=True)
        return {name: sign * value for name, sign, value in found if value != -math.inf}


def _vector(values: Sequence[float | Tensor], device: torch.device | str) -> Tensor:
    """Return float64 ``[n]`` on ``device``. Numbers are copied together: one at a time, the host would wait for the device at each."""
    vector = torch.tensor([0.0 if isinstance(value, Tensor) else value for value in values], dtype=torch.float64, device=device)
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    if places:
        held = torch.stack([torch.as_tensor(values[place], dtype=torch.float64, device=device) for place in places])
        vector.index_copy_(0, torch.tensor(places, device=device), held)
    return vector
