"""The ``math_steps`` verifier: the answer judged as by ``math``, and a reward for each line whose equations can be checked."""

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
    """The score of ``math``, and for each line with an equation of numbers (``12 + 30 = 42``) a step reward: 1 if all its equations
    hold, 0 if one does not. Lines without one (words, unknowns, ``5 = 5``) and lines of more than 2,000 characters have no reward.

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
    """Whether each equation of the line holds; what only looks like one is passed over."""
    for run in _RUN.finditer(line):
        sides = [side.strip() for side in run.group().split("=")]
        # Beside a letter or a power a side is part of something larger, which cannot be worked out.
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
