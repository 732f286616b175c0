"""How far two sets of next-token distributions are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distance:
    """Over all positions: |dlogp| of the whole vocabulary (mean, largest), KL(first || second), and the share with the same likeliest
    token. ``where``: sequence and position of the largest. ``support``: ids that only one of the two gives a probability."""

    mean: float
    largest: float
    kl: float
    top1: float
    where: tuple[int, int]
    support: int


def distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> Distance:
    """Compare log-probs, float32 [positions, vocabulary] a sequence, -inf outside the softmax. Sums are in float64."""
    total, count, kl, same, positions, support = 0.0, 0, 0.0, 0, 0, 0
    largest, where = 0.0, (0, 0)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        inside = one.isfinite() & other.isfinite()
        support += int((one.isfinite() != other.isfinite()).any(0).sum())
        gap = torch.where(inside, one.double() - other.double(), 0.0)
        if not bool(gap.isfinite().all()) or bool(one.isnan().any()) or bool(other.isnan().any()):
            return Distance(math.nan, math.nan, math.nan, 0.0, (number, 0), support)
        total += float(gap.abs().sum())
        count += int(inside.sum())
        kl += float((one.double().exp() * gap).sum())
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
        positions += len(one)
        by_position = gap.abs().amax(-1) if len(gap) else gap.new_zeros(0)
        if len(gap) and float(by_position.max()) > largest:
            largest, where = float(by_position.max()), (number, int(by_position.argmax()))
    return Distance(total / max(1, count), largest, kl / max(1, positions), same / max(1, positions), where, support)


def chosen(logprobs: Sequence[Tensor], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of the sequences' own tokens, from the second on, rounded to 6 digits: what a certificate keeps."""
    return [
        [round(value, 6) for value in rows.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()]
        for rows, ids in zip(logprobs, sequences, strict=True)
    ]
