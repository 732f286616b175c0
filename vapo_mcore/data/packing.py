"""Schedule of a rollout: assigns rows to mini-batches, data-parallel ranks, and micro-batches under a hard token cap.

``schedule`` draws mini-batches by a seeded shuffle, balances the rows of each over the data-parallel ranks in tokens and
attention-aware cost (the ranks synchronise once per mini-batch, so the slowest one sets the time), and packs each rank's rows into
micro-batches by best-fit decreasing. It depends only on lengths and a seed and uses IEEE double arithmetic in a fixed order, so every
process computes the same schedule without communication.

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

_PACKABLE = 0.996  # fraction of the token capacity that best-fit decreasing reliably fills, over many micro-batches
_MANY = 32  # from this many micro-batches per rank on, limit some ranks to a whole number of them
_UNEVEN = 1.005  # the other ranks may then exceed the mean number of tokens by this factor


@dataclass(frozen=True)
class ScheduledMiniBatch:
    """One optimizer step. ``microbatches[dp_rank][k]``: row indices; all ranks have the same number of micro-batches, some empty."""

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
        minibatches: the optimizer steps; their numbers of rows differ by at most one.
        owner: int64 ``[N]``, data-parallel rank of each row of the rollout; -1 for unscheduled rows.
    """

    minibatches: list[ScheduledMiniBatch]
    owner: torch.Tensor


def attention_cost_ratio(architecture: ModelArchitecture) -> float:
    """Compute the weight of L**2 in a sequence's cost from the model's dimensions.

    Multiply-adds per token: the weights it is multiplied with (QKV and output projections, MLP, output layer), and in each layer, for
    causal attention, ``heads * head_dim * (L / 2)`` for the scores and as much for the weighted sum. The ratio is the second over the
    first, per L: about 1 / (12 hidden) for a standard transformer. A mixture of experts counts the active experts.
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
    """Assign the rows of a rollout to mini-batches, data-parallel ranks and micro-batches.

    Args:
        lengths: tokens of each of the N rows (prompt + response).
        minibatch_size: rows per optimizer step; if it does not divide the rows, the ``minibatch_count`` mini-batches differ by one row.
        dp_size: number of data-parallel ranks.
        max_tokens: hard cap on the padded tokens of a micro-batch, summed over its context-parallel ranks.
        seed: seed of the shuffle that draws the mini-batches.
        microbatch_multiple, min_microbatches: the number of micro-batches per mini-batch is a multiple of the first and at least the
            second (required by an interleaved pipeline). If that needs more micro-batches than packing, rows are spread over them where
            the cap allows; otherwise empty micro-batches are added.
        pad_multiple, total_multiple: multiples that a sequence and a whole micro-batch are padded to (see ``thd.pad_multiples``).
        attention_cost_ratio: weight of L**2 in the cost (see the function of that name); 0 balances tokens only.
        rows: rows to train on (None: all); the others are not scheduled.

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
    """Raise one DataError for all rows longer than the cap."""
    long = rows[padded[rows] > cap]
    if long.size:
        shown = ", ".join(f"row {row}: {length[row]} tokens" for row in long[:20])
        padding = f" ({cap} after rounding down to the pad multiple)" if cap != max_tokens else ""
        raise DataError(
            f"{long.size} of {rows.size} rows are longer than max_tokens_per_microbatch = {max_tokens}{padding}: {shown}"
            f"{', ...' if long.size > 20 else ''}; sequences are neither truncated nor split over micro-batches: raise the cap to "
            f"at least {int(padded[rows].max())} (longest prompt + longest response, padded)"
        )


def _token_limits(total: int, dp_size: int, cap: int) -> NDArray:
    """Return the token limit of each rank, chosen so that few micro-batches stay half empty.

    With equal shares the last micro-batch of every rank would be filled to the same fraction, possibly almost empty. If a share fills
    many micro-batches, some ranks are limited to a whole number of them and the others take the rest; enough ranks stay unlimited that
    none exceeds the mean by more than the factor ``_UNEVEN``. Otherwise no rank is limited.
    """
    limits = np.full(dp_size, np.inf)
    mean = total / dp_size
    whole = math.ceil(total / (cap * _PACKABLE)) // dp_size
    held, lifted = whole * cap * _PACKABLE, mean * _UNEVEN
    if whole >= _MANY and held < mean:
        limits[: dp_size - math.ceil(dp_size * (mean - held) / (lifted - held))] = held
    return limits


def _pack(rows: NDArray, padded: NDArray, cost: NDArray, cap: int) -> list[list[int]]:
    """Pack one rank's rows by best-fit decreasing, then even out the bins at that number where the cap allows."""
    order = np.argsort(-padded, kind="stable")
    bins: list[list[int]] = []
    room: list[int] = []  # free tokens of each bin, ascending
    number: list[int] = []  # bin index of each entry of room
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
    """Spread one rank's rows over ``count`` micro-batches, which the pipeline runs anyway; None if that would exceed the cap."""
    own = np.array([row for rows in bins for row in rows], dtype=np.int64)
    own = own[np.argsort(-padded[own], kind="stable")]
    return _even(own.tolist(), padded[own].tolist(), cost[own].tolist(), cap, count)


def _even(rows: list[int], padded: list[int], cost: list[float], cap: int, count: int) -> list[list[int]] | None:
    """Assign rows, longest first, to the cheapest of ``count`` bins (equal bins keep a pipeline full). None if that exceeds the cap."""
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
