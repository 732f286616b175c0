"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2, Eq. 11): keep groups with both right and wrong responses.

Pure functions and a small collector: the caller generates, grades and feeds rounds; the collector decides what is kept
and how many prompts the next round draws. It runs on the first rank, whose decision is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def is_uniform(verdicts: Sequence[bool], graded: Sequence[bool]) -> bool:
    """True if the raw verdicts of a group are all right or all wrong.

    Responses whose grading failed do not count; a group with fewer than one right and one wrong verdict is uniform. Raw
    verdicts, not shaped rewards: length penalties must not make an all-wrong group look informative.
    """
    known = [verdict for verdict, ok in zip(verdicts, graded, strict=True) if ok]
    return not (any(known) and not all(known))


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

    def add_round(self, verdicts: Sequence[Sequence[bool]], graded: Sequence[Sequence[bool]]) -> None:
        """Take one round of groups: ``verdicts[g][i]`` of response i of group g."""
        for group, (right, known) in enumerate(zip(verdicts, graded, strict=True)):
            self.tried += 1
            if is_uniform(right, known):
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
