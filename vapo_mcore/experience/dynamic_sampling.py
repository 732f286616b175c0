"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2, Eq. 11): keep groups with both right and wrong responses.

The caller samples and grades rounds of prompts; ``GroupCollector`` decides which groups to keep and how many prompts the next round draws.
It runs on rank 0, which broadcasts the decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

SAME_SCORE = 1e-6
"""Tolerance for equal scores, which are float32 sums of step rewards."""


def is_uniform(scores: Sequence[float], graded: Sequence[bool]) -> bool:
    """Return whether all graded responses of a group have the same score; True if fewer than two are graded.

    ``scores``: raw verdicts as 0 and 1, or scores with partial credit (including step and turn rewards). Do not pass shaped rewards:
    length penalties would make an all-wrong group look informative.
    """
    known = [float(score) for score, ok in zip(scores, graded, strict=True) if ok]
    return not known or max(known) - min(known) <= SAME_SCORE


@dataclass
class GroupCollector:
    """Collects ``target`` non-uniform groups over at most ``max_rounds`` rounds.

    ``kept``: (round, group) pairs in the order drawn, at most ``target``. ``surplus``: number of further non-uniform groups in the last
    round, which are dropped because they would be off-policy later. ``ungraded``: number of groups without any verdict.
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
        self, verdicts: Sequence[Sequence[bool]], graded: Sequence[Sequence[bool]], scores: Sequence[Sequence[float]] | None = None
    ) -> None:
        """Add one round of groups; ``verdicts[g][i]`` belongs to response i of group g.

        A group is kept if its responses differ in ``scores`` (None: in the verdicts).
        """
        for group, (right, known, numbers) in enumerate(zip(verdicts, graded, verdicts if scores is None else scores, strict=True)):
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
        """Return whether the batch is still not full after the last allowed round."""
        return self.missing > 0 and self.rounds >= self.max_rounds

    def next_draw(self) -> int:
        """Return how many prompts to draw in the next round: missing groups / acceptance rate, at most ``target``; 0 when done."""
        if self.missing == 0 or self.rounds >= self.max_rounds:
            return 0
        if self.rounds == 0 or not self.kept:
            return self.target
        accepted = (len(self.kept) + self.surplus) / self.tried
        return min(self.target, math.ceil(self.missing / accepted))
