"""The ``math_steps`` verifier: grade the answer like ``math``, and reward each line whose equations can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vapo_mcore.environments.arithmetic import ArithmeticFault, evaluate
from vapo_mcore.rewards.mathematics import math
from vapo_mcore.rewards.region import answer_region
from vapo_mcore.rewards.types import StepReward, StepScores

_RUN = re.compile(r"[-+*/()\u00d7\u00b7\u00f7\u2212\d.\s=]+")  # one class: linear time on any line
_OPERATORS = "+-*/\u00d7\u00b7\u00f7\u2212"
MAX_LINE = 2000


def math_steps(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> StepScores:
    """Return the score of ``math`` and step rewards of the lines.

    A line with equations of numbers (``12 + 30 = 42``) gets reward 1 if all of them hold, else 0. Lines without such an equation (words,
    unknowns, ``5 = 5``) and lines of more than 2,000 characters get none.

    Raises:
        UngradableError: the ground truth cannot be read as mathematics.
    """
    steps = []
    end = 0
    for line in response.splitlines(keepends=True):
        end += len(line)
        verdicts = list(_equations(line)) if len(line) <= MAX_LINE else []
        if verdicts:
            steps.append(StepReward(end, float(all(verdicts))))
    return StepScores(math(answer_region(response, metadata), ground_truth, metadata), steps)


def _equations(line: str) -> Iterator[bool]:
    """Yield whether each equation of the line holds; skip what only looks like an equation."""
    for run in _RUN.finditer(line):
        sides = [side.strip() for side in run.group().split("=")]
        # Next to a letter or a power a side is part of a larger expression that cannot be evaluated.
        if _continues(line[run.start() - 1 : run.start()]) and (not run.group()[0].isspace() or sides[0][:1] in tuple(_OPERATORS)):
            del sides[0]
        if sides and _continues(line[run.end() : run.end() + 1]) and not run.group()[-1].isspace():
            del sides[-1]
        try:
            values = [evaluate(side.removesuffix(".")) for side in sides if side]
        except ArithmeticFault:
            continue
        if len(values) > 1 and any(symbol in side[1:] for side in sides for symbol in _OPERATORS):
            yield all(value == values[0] for value in values)


def _continues(neighbour: str) -> bool:
    return neighbour.isalnum() or (neighbour != "" and neighbour in "_^%\\{}")
