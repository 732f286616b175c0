"""math-verify as a reader and a judge: text to sympy, and whether two sympy objects are equal.

Everything here imports sympy (half a second), so only workers import it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from vapo_mcore.rewards.shortcuts import compare_linear_equations, compare_scalars

# math-verify warns that its own time-out is off. It is: it needs SIGALRM in the main thread, and the pool has a better one.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


def in_two_stages(create_parser: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Wraps the LaTeX parser's constructor so that it predicts without context first, and with context where that fails.

    This is ANTLR's own advice (two-stage parsing): without context ("SLL") prediction is cached and several times as
    fast, and it either finds the same tree or reports a syntax error. The grammar at hand rarely needs more.
    """

    def create(self: Any, latex: str) -> Any:
        parser = create_parser(self, latex)
        first_stage = parser.math
        parser._interp.predictionMode = PredictionMode.SLL

        def math() -> Any:
            try:
                return first_stage()
            except Exception:  # noqa: BLE001 - latex2sympy's error listener raises plain Exception
                return create_parser(self, latex).math()

        parser.math = math
        return parser

    return create


_Latex2Sympy.create_parser = in_two_stages(_Latex2Sympy.create_parser)


@lru_cache(maxsize=4096)
def read_expression(text: str) -> Any:
    """The sympy object that an answer in LaTeX or plain notation stands for; None if it is not mathematics.

    Powers and the like stay unevaluated. The responses of a group share their ground truth, hence the cache.
    """
    found = parse(rf"\boxed{{{text}}}", _TARGETS, fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def expressions_equal(truth: Any, answer: Any, tolerance: float) -> bool:
    """math-verify's verdict on two sympy objects; scalars further apart than ``tolerance`` somewhere are not equal.

    Intervals and inequalities may answer each other.
    """
    quick = compare_scalars(truth, answer, tolerance)
    if quick is None:
        quick = compare_linear_equations(truth, answer)
    if quick is not None:
        return bool(quick)
    return bool(verify(truth, answer, allow_set_relation_comp=True, timeout_seconds=None))
