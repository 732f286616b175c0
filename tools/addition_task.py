r"""Generate problems and worked solutions of the tiny model's task: repeated multi-digit addition with carries.

The problem "start with 37 and add 58 three times" has the prompt ``_/c+58:730;`` and the solution

    a/c+58:590;b/c+58:351;c/c+58:112;\boxed{211}

Each addition is one entry: its letter, the last letter, the addend, and the new total in three digits, units first, the order in which
carries propagate. A solution has 10 to 165 characters, and one wrong sum makes the answer wrong. Everything that an entry depends on is at
a fixed distance before it, so that a very small model learns the procedure within a minute.
"""

from __future__ import annotations

import random
from collections.abc import Set
from dataclasses import dataclass

LETTERS = "_abcdefghijklmn"
MAX_TIMES = len(LETTERS) - 1
CHARACTERS = "".join(dict.fromkeys("0123456789" + LETTERS + "/+:;\\boxed{}"))
"""The characters of prompts and solutions."""

_SLIPS = (-10, -2, -1, 1, 2, 10)  # a wrong digit; +-10 is a missing or extra carry
_LARGEST_START, _SMALLEST_ADDEND, _LARGEST_ADDEND, _LARGEST_TOTAL = 99, 10, 60, 999


@dataclass(frozen=True, order=True)
class Problem:
    """Start with ``start`` (0..99) and add ``addend`` (10..60) ``times`` (0..14) times; the total has at most three digits."""

    start: int
    addend: int
    times: int

    @property
    def prompt(self) -> str:
        return self._line(0, self.start)

    @property
    def answer(self) -> str:
        return str(self.start + self.times * self.addend)

    def _line(self, number: int, total: int) -> str:
        return f"{LETTERS[number]}/{LETTERS[self.times]}+{self.addend}:{f'{total:03d}'[::-1]};"


def draw_problem(rng: random.Random) -> Problem:
    return Problem(rng.randint(0, _LARGEST_START), rng.randint(_SMALLEST_ADDEND, _LARGEST_ADDEND), rng.randint(0, MAX_TIMES))


def draw_distinct(count: int, rng: random.Random, exclude: Set[Problem] = frozenset()) -> list[Problem]:
    """Draw ``count`` distinct problems that are not in ``exclude``."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problem = draw_problem(rng)
        if problem not in exclude:
            problems[problem] = None
    return list(problems)


def worked_solution(problem: Problem, *, slip_probability: float = 0.0, rng: random.Random | None = None) -> str:
    """Return the solution as text, without end-of-sequence.

    Each sum is wrong with ``slip_probability``, independently; later sums continue from the wrong total. ``rng`` is required unless the
    probability is 0.
    """
    total, lines = problem.start, []
    for number in range(1, problem.times + 1):
        total += problem.addend
        if slip_probability > 0:
            assert rng is not None, "slip_probability > 0 requires rng"
            if rng.random() < slip_probability:
                total = min(max(total + rng.choice(_SLIPS), 0), _LARGEST_TOTAL)
        lines.append(problem._line(number, total))
    return "".join(lines) + f"\\boxed{{{total}}}"
