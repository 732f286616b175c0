"""Estimate how much of a rollout waits for its longest responses, with and without ``rollout.horizon``.

Closed formulas for lognormal lengths that are truncated at the limit and do not depend on the prompt; ``benchmarks/horizon.py`` compares
them with a simulation of each response. With S(t) the share of responses longer than t:

- an open response is in its segment k (from 0) with probability S(kH) / sum_j S(jH), in the steady state, so a segment has at least t
  tokens with probability sum_k S(kH + t - 1) / sum_j S(jH), for t up to H; without a horizon a segment is the response;
- responses that all run at once take as many engine steps as the longest of them: sum_t 1 - P(segment < t)^n;
- with more responses than slots the queue is empty when the work left is the rest of one segment a slot, whose rest has the density
  P(segment > t) / E[segment]; the longest rest ends the step;
- a token at position p reads p cached tokens, whichever step samples it, so the mean cache of a running response is that of whole
  responses: E[L^2] / 2 E[L].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """Response lengths. ``survival``: float64 [longest + 1], the share of responses with more than t tokens, for t from 0."""

    survival: Floats

    @classmethod
    def lognormal(cls, mean: float, sigma: float, longest: int) -> Self:
        """Return lognormal lengths. ``mean``: before the truncation at ``longest``; ``sigma``: standard deviation of the logarithm."""
        centre = math.log(mean) - sigma**2 / 2
        tokens = np.arange(1, longest)
        beyond = [0.5 * math.erfc((math.log(t) - centre) / (sigma * math.sqrt(2))) for t in tokens]
        return cls(np.array([1.0, *beyond, 0.0]))

    @property
    def longest(self) -> int:
        return len(self.survival) - 1

    @property
    def mean(self) -> float:
        return float(self.survival.sum())

    @property
    def context(self) -> float:
        """Mean response tokens before a token, over all tokens."""
        return float((np.arange(len(self.survival)) * self.survival).sum()) / self.mean

    def segments(self, horizon: int) -> Segments:
        """Return the segments of at most ``horizon`` tokens that the open responses have in the steady state."""
        starts = np.arange(0, self.longest, horizon)
        padded = np.concatenate([self.survival, np.zeros(horizon + 1)])
        alive = padded[starts[:, None] + np.arange(horizon)] / self.survival[starts].sum()  # [segments, t]: in segment k with more than t
        mass = alive - np.append(alive[:, 1:], np.zeros((len(starts), 1)), axis=1)  # ... and with t + 1 tokens
        tokens = np.arange(1, horizon + 1)
        read = tokens * starts[:, None] + tokens**2 / 2
        survival = np.append(alive.sum(0), 0.0)
        before = np.append(starts @ alive, 0.0) / np.maximum(survival, 1e-300)
        return Segments(survival, before, float((mass * read).sum()), float((mass * read**2).sum()))


@dataclass(frozen=True)
class Segments:
    """What a step samples of an open response.

    ``survival``: as of ``Lengths``; ``before``: mean response tokens before the segments with more than t tokens, as many entries;
    ``read``, ``read_square``: mean of the cached response tokens that a segment's engine steps read together, and mean of their square.
    """

    survival: Floats
    before: Floats
    read: float
    read_square: float

    @property
    def mean(self) -> float:
        return float(self.survival.sum())

    @property
    def square(self) -> float:
        """E[segment^2]."""
        return float(((2 * np.arange(len(self.survival)) + 1) * self.survival).sum())


@dataclass(frozen=True)
class Waiting:
    """Estimate of a step's rollout.

    ``horizon``: None without one. ``idle``: share of replica time after a replica's last token; ``empty``: share of slot time without a
    running response, ``idle`` included; ``prefill``: share of the time. ``tokens``: sampled in a step by one replica. ``seconds``: of
    a step's rollout. ``before``: mean response tokens before a segment.
    """

    horizon: int | None
    seconds: float
    idle: float
    empty: float
    prefill: float
    tokens: float
    before: float

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of one replica."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Replicas:
    """Replicas of the rollout engine.

    Attributes:
        count: replicas.
        responses: open responses of each.
        slots: responses that one runs at a time.
        prompt: tokens of a prompt.
        step_seconds: seconds of an engine step with so many running responses that have so many cached tokens together.
        prefill_seconds: seconds of a prefill of so many tokens.
    """

    count: int
    responses: int
    slots: int
    prompt: float
    step_seconds: Callable[[Floats, Floats], Floats]
    prefill_seconds: Callable[[float], float]


def estimate_waiting(lengths: Lengths, replicas: Replicas, horizon: int | None) -> Waiting:
    """Estimate a step's rollout in the steady state."""
    segments = lengths.segments(lengths.longest if horizon is None else min(horizon, lengths.longest))
    count, responses, slots = replicas.count, replicas.responses, min(replicas.slots, replicas.responses)
    context = replicas.prompt + segments.read / segments.mean
    place = np.arange(len(segments.survival), dtype=np.float64)
    rest, drawn, full, cached = segments.survival, responses, 0.0, replicas.prompt + segments.before + place
    if responses > slots:
        tail = _from(segments.survival)
        cached = replicas.prompt + segments.before[0] + _from(place * segments.survival) / np.maximum(tail, 1e-300)
        rest, drawn = np.append(tail[1:], 0.0) / segments.mean, slots
        full = max(0.0, (responses * segments.mean / slots) - float(rest.sum()))
    goes_on, slowest = (1 - (1 - rest) ** draws for draws in (drawn, count * drawn))  # by engine step: has a running response
    running = drawn * rest / np.maximum(goes_on, 1e-300)
    step = replicas.step_seconds(running, running * cached)
    # Until the queue is empty, what the steps after it do not read: responses that start first are short of context then.
    read = responses * (segments.read + replicas.prompt * segments.mean) - float((goes_on * running * cached).sum())
    at_full = float(replicas.step_seconds(np.array(float(slots)), np.array(max(read, 0.0) / full))) if full else 0.0
    decode = full * at_full + float((goes_on * step).sum())
    slot_time = full * at_full * slots + float((goes_on * running * step).sum())
    before = float(segments.before[0])
    prefill = replicas.prefill_seconds(responses * (replicas.prompt + before))
    alone = replicas.step_seconds(np.array(1.0), np.array(context))
    # Replicas differ in the longest response, and in the tokens that they sample and read.
    late = float((slowest - goes_on).sum() * alone) + _spread(segments, replicas, slots) * _largest_normal(count)
    seconds = decode + prefill + late
    busy = slot_time + prefill * slots
    return Waiting(horizon, seconds, late / seconds, 1 - busy / (slots * seconds), prefill / seconds, responses * segments.mean, before)


def _from(values: Floats) -> Floats:
    """Return the sums over the entries from each one on."""
    return values[::-1].cumsum()[::-1]


def _spread(segments: Segments, replicas: Replicas, slots: int) -> float:
    """Return the standard deviation of the replicas' seconds: of reading the cache and, with a queue, of engine steps."""
    per_token = float(replicas.step_seconds(np.array(1.0), np.array(1e6)) - replicas.step_seconds(np.array(1.0), np.array(0.0))) / 1e6
    reading = per_token * math.sqrt(max(0.0, segments.read_square - segments.read**2) * replicas.responses)
    if replicas.responses <= slots:
        return reading
    steps = math.sqrt(max(0.0, segments.square - segments.mean**2) * replicas.responses) / slots
    return reading + steps * float(replicas.step_seconds(np.array(float(slots)), np.array(0.0)))


def _largest_normal(draws: int) -> float:
    """Return the expected maximum of ``draws`` standard normal numbers."""
    grid = np.linspace(-8.0, 8.0, 4001)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in grid]) ** draws
    return float(np.where(grid > 0, 1 - below, -below).sum() * (grid[1] - grid[0]))
