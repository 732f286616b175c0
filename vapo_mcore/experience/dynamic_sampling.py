"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2, Eq. 11): keep groups with both right and wrong responses.

Pure functions and a small collector: the caller generates, grades and feeds rounds; the collector decides what is kept
and how many prompts the next round draws. It runs on the first rank, whose decision is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SAME_SCORE = 1e-6
"""Scores that differ by no more are equal: float32 sums of step rewards."""


def is_uniform(earned: Sequence[float], graded: Sequence[bool]) -> bool:
    """True if all graded responses of a group earned the same; also where fewer than two are graded.

    ``earned``: the raw verdicts as 0 and 1, or scores with partial credit (with the rewards of steps and turns). Never shaped rewards:
    length penalties must not make an all-wrong group look informative.
    """
    known = [float(number) for number, ok in zip(earned, graded, strict=True) if ok]
    return not known or max(known) - min(known) <= SAME_SCORE


@dataclass
class GroupCollector:
    """Fills a batch of ``target`` groups with informative ones over at most ``max_rounds`` rounds.

    ``kept``: (round, group) pairs in the order drawn, at most ``target``. Surplus informative groups of the last round
    are not kept for later (they would be off-policy then) and are counted. ``ungraded``: groups without a single verdict.
    """

    target: int
    max_rounds: int
    kept: list[tuple[int, int]] = field(default_factory=list)
    rounds: int = 0
    tried: int = 0
    all_right: int = 0
    all_wrong: int = 0
    ungraded: int = 0
    surplus: int = 0

    def add_round(
        self, verdicts: Sequence[Sequence[bool]], graded: Sequence[Sequence[bool]], earned: Sequence[Sequence[float]] | None = None
    ) -> None:
        """Take one round of groups: ``verdicts[g][i]`` of response i of group g.

        ``earned``: what the responses of a group must differ in to be kept (None: the verdicts).
        """
        for group, (right, known, numbers) in enumerate(zip(verdicts, graded, verdicts if earned is None else earned, strict=True)):
            self.tried += 1
            if is_uniform(numbers, known):
                if not any(known):
                    self.ungraded += 1
                elif any(verdict for verdict, ok in zip(right, known, strict=True) if ok):
                    self.all_right += 1
                else:
                    self.all_wrong += 1
            elif len(self.kept) < self.target:
                self.kept.append((self.rounds, group))
            else:
                self.surplus += 1
        self.rounds += 1

    @property
    def missing(self) -> int:
        return self.target - len(self.kept)

    @property
    def exhausted(self) -> bool:
        """Not full after the last allowed round."""
        return self.missing > 0 and self.rounds >= self.max_rounds

    def next_draw(self) -> int:
        """Prompts to draw in the next round (0: done): what is missing, scaled by the acceptance seen, at most a full batch."""
        if self.missing == 0 or self.rounds >= self.max_rounds:
            return 0
        if self.rounds == 0 or not self.kept:
            return self.target
        accepted = (len(self.kept) + self.surplus) / self.tried
        return min(self.target, math.ceil(self.missing / accepted))
