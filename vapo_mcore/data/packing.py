"""Which row trains when and where: mini-batches, data-parallel ranks, and micro-batches under a hard token cap.

``schedule`` draws mini-batches by a seeded shuffle, spreads the rows of each over the data-parallel ranks so that tokens and
attention-aware cost are equal (the ranks wait for each other once a mini-batch, so that is what costs time), and packs each
rank's rows into as few micro-batches as best-fit decreasing finds. Everything is decided from lengths and a seed, with IEEE
double arithmetic in a fixed order, so that every process comes to the same schedule by itself.

Cost of a sequence of L tokens, in units of one token's dense work: ``L + attention_cost_ratio * L**2``.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema.run import minibatch_count
from vapo_mcore.data.balance import balance
from vapo_mcore.errors import DataError

_PACKABLE = 0.996  # share of many micro-batches' tokens that best-fit decreasing can be relied on to fill
_MANY = 32  # micro-batches a rank from which whole numbers of them are aimed at
_UNEVEN = 1.005  # how far ranks with one micro-batch more may then rise above the mean in tokens


@dataclass(frozen=True)
class ScheduledMiniBatch:
    """One optimizer step. ``microbatches[dp_rank][k]`` are row numbers; every rank has equally many, an empty one has no rows."""

    microbatches: list[list[list[int]]]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches on each data-parallel rank."""
        return len(self.microbatches[0])

    @property
    def rows(self) -> list[int]:
        """Row numbers of the mini-batch, by rank and micro-batch."""
        return [row for rank in self.microbatches for microbatch in rank for row in microbatch]


@dataclass(frozen=True)
class Schedule:
    """All mini-batches of a rollout, in training order.

    Attributes:
        minibatches: the optimizer steps, of equal numbers of rows up to one.
        owner: int64 ``[N]``, data-parallel rank of each row of the rollout; -1 for rows that are not scheduled.
    """

    minibatches: list[ScheduledMiniBatch]
    owner: torch.Tensor


def attention_cost_ratio(architecture: ModelArchitecture) -> float:
    """Weight of L**2 in a sequence's cost, from the model's dimensions.

    Multiply-adds of one token: the matrix weights it passes (QKV and output projections, MLP, output layer), and for causal
    attention ``heads * head_dim * (L / 2)`` for the scores and as much for the weighted sum, in each layer. The ratio is the
    second over the first, per L: about 1 / (12 hidden) for a classical transformer. A mixture of experts counts the experts
    of one token.
    """
    a = architecture
    heads = a.num_attention_heads * a.head_dim
    attention_weights = a.hidden_size * (2 * heads + 2 * a.num_key_value_heads * a.head_dim)
    if a.num_experts is None:
        mlp_width = a.ffn_hidden_size
    else:
        mlp_width = (a.moe_ffn_hidden_size or a.ffn_hidden_size) * (a.num_experts_per_token or 1)
    dense = a.num_layers * (attention_weights + 3 * a.hidden_size * mlp_width) + a.hidden_size * a.vocab_size
    return a.num_layers * heads / dense


def schedule(
    lengths: Sequence[int] | NDArray[np.int64] | torch.Tensor,
    minibatch_size: int,
    dp_size: int,
    max_tokens: int,
    *,
    seed: int,
    microbatch_multiple: int = 1,
    min_microbatches: int = 1,
    pad_multiple: int = 1,
    total_multiple: int = 1,
    attention_cost_ratio: float = 0.0,
    rows: Sequence[int] | NDArray[np.int64] | torch.Tensor | None = None,
) -> Schedule:
    """Mini-batches, owners and micro-batches of a rollout.

    Args:
        lengths: tokens of each of the N rows (prompt + response).
        minibatch_size: rows an optimizer step; where it does not divide the rows, ``minibatch_count`` mini-batches equal up to one row.
        dp_size: data-parallel ranks.
        max_tokens: hard cap on the padded tokens of a micro-batch, over all its context-parallel ranks together.
        seed: of the shuffle that draws the mini-batches.
        microbatch_multiple, min_microbatches: the number of micro-batches of a mini-batch is a multiple of the one and at least
            the other (what an interleaved pipeline needs). Rows are spread over what the pipeline demands; ranks are filled up
            with empty micro-batches otherwise.
        pad_multiple, total_multiple: what a sequence and a whole micro-batch are padded to (see ``thd.pad_multiples``).
        attention_cost_ratio: weight of L**2 in the cost (see the function of that name); 0 balances tokens alone.
        rows: the rows to train on (all when None); the others get no place.

    Raises:
        DataError: a row is longer than the cap; names the rows and their lengths.
    """
    length = np.asarray(lengths, dtype=np.int64)
    padded = -(-length // pad_multiple) * pad_multiple
    cap = max_tokens // total_multiple * total_multiple
    chosen = np.arange(length.size) if rows is None else np.asarray(rows, dtype=np.int64)
    _refuse_long_rows(chosen, length, padded, cap, max_tokens)
    drawn = np.random.default_rng(seed).permutation(chosen)
    cost = padded + attention_cost_ratio * padded.astype(np.float64) ** 2
    owner = np.full(length.size, -1, dtype=np.int64)
    minibatches = []
    count = minibatch_count(drawn.size, minibatch_size)
    for members in np.array_split(drawn, count) if count else []:
        ranks = balance(padded[members], cost[members], _token_limits(int(padded[members].sum()), dp_size, cap))
        owner[members] = ranks
        packed = []
        for rank in range(dp_size):
            own = members[ranks == rank]
            packed.append(_pack(own, padded[own], cost[own], cap))
        needed = max(len(bins) for bins in packed)
        steps = -(-max(needed, min_microbatches) // microbatch_multiple) * microbatch_multiple
        if steps > needed:
            packed = [_spread(bins, padded, cost, cap, steps) or bins for bins in packed]
        minibatches.append(ScheduledMiniBatch([bins + [[] for _ in range(steps - len(bins))] for bins in packed]))
    return Schedule(minibatches, torch.from_numpy(owner))


def _refuse_long_rows(rows: NDArray, length: NDArray, padded: NDArray, cap: int, max_tokens: int) -> None:
    """One error for all rows that no micro-batch can hold."""
    long = rows[padded[rows] > cap]
    if long.size:
        shown = ", ".join(f"row {row}: {length[row]} tokens" for row in long[:20])
        padding = f" ({cap} after rounding down to the pad multiple)" if cap != max_tokens else ""
        raise DataError(
            f"{long.size} of {rows.size} rows are longer than max_tokens_per_microbatch = {max_tokens}{padding}: {shown}"
            f"{', ...' if long.size > 20 else ''}; a sequence is never cut or split over micro-batches, so the cap must be at "
            f"least {int(padded[rows].max())} (longest prompt + longest response, padded)"
        )


def _token_limits(total: int, dp_size: int, cap: int) -> NDArray:
    """Tokens each rank should not exceed, so that few micro-batches stay half empty.

    With exactly equal shares the last micro-batch of every rank would be filled to the same fraction, down to nothing. Where a
    share is many caps long, some ranks are held to a whole number of micro-batches instead and the others take the rest, as
    many of them as it needs to lift none above the mean by more than ``_UNEVEN``. Otherwise nothing is limited.
    """
    limits = np.full(dp_size, np.inf)
    mean = total / dp_size
    whole = math.ceil(total / (cap * _PACKABLE)) // dp_size
    held, lifted = whole * cap * _PACKABLE, mean * _UNEVEN
    if whole >= _MANY and held < mean:
        limits[: dp_size - math.ceil(dp_size * (mean - held) / (lifted - held))] = held
    return limits


def _pack(rows: NDArray, padded: NDArray, cost: NDArray, cap: int) -> list[list[int]]:
    """One rank's rows in as few bins as best-fit decreasing finds, evened out over that many bins where the cap allows."""
    order = np.argsort(-padded, kind="stable")
    bins: list[list[int]] = []
    room: list[int] = []  # what is left in each bin, ascending, and beside it the bin's number
    number: list[int] = []
    for row, length in zip(rows[order].tolist(), padded[order].tolist(), strict=True):
        k = bisect_left(room, length)
        if k == len(room):
            left, b = cap - length, len(bins)
            bins.append([row])
        else:
            left, b = room.pop(k) - length, number.pop(k)
            bins[b].append(row)
        k = bisect_left(room, left)
        room.insert(k, left)
        number.insert(k, b)
    return _even(rows[order].tolist(), padded[order].tolist(), cost[order].tolist(), cap, len(bins)) or bins


def _spread(bins: list[list[int]], padded: NDArray, cost: NDArray, cap: int, count: int) -> list[list[int]] | None:
    """One rank's rows over ``count`` micro-batches, since the pipeline runs that many anyway; None when that breaks the cap."""
    own = np.array([row for rows in bins for row in rows], dtype=np.int64)
    own = own[np.argsort(-padded[own], kind="stable")]
    return _even(own.tolist(), padded[own].tolist(), cost[own].tolist(), cap, count)


def _even(rows: list[int], padded: list[int], cost: list[float], cap: int, count: int) -> list[list[int]] | None:
    """Longest first into the cheapest of ``count`` bins: equal micro-batches keep a pipeline full. None when the cap breaks."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, b) for b in range(count)]
    for row, length, price in zip(rows, padded, cost, strict=True):
        total, b = heap[0]
        if tokens[b] + length > cap:
            return None
        tokens[b] += length
        bins[b].append(row)
        heapq.heapreplace(heap, (total + price, b))
    return sorted((b for b in bins if b), key=len)
