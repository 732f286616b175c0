"""Parse answers to sympy and compare sympy objects, based on math-verify.

Importing this module imports sympy (half a second), so only workers import it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy, latex2sympy
from math_verify import LatexExtractionConfig, grader, verify
from math_verify.parser import get_last_eq, normalize_latex, should_treat_as_complex

from vapo_mcore.rewards.normalization import without_unit
from vapo_mcore.rewards.scalars import relations_equal, rounds_to, scalars_equal

# math-verify warns that its time-out is disabled. That is intended: it needs SIGALRM in the main thread, and the pool limits the time.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_SPELLING = replace(LatexExtractionConfig().normalization_config, boxed="last", units=False)
_CASE_SENSITIVE = ConversionConfig(lowercase_symbols=False)
"""math-verify's default would read ``R`` and ``r`` as one symbol."""


def in_two_stages(create_parser: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Wrap the LaTeX parser's constructor for two-stage parsing: SLL prediction first, full context if that fails.

    ANTLR recommends this: SLL prediction (without context) is cached and several times as fast, and it either finds the same tree or
    reports a syntax error. This grammar rarely needs the second stage.
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


def _numerically_equal(a: Any, b: Any, *_: int) -> bool:
    """Replace math-verify's numeric comparison, which rounds to 6 decimals and treats anything below 1e-15 as zero."""
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(scalars_equal(one, other) for one, other in zip(a.flat(), b.flat(), strict=True))
    return bool(scalars_equal(a, b))


_simplify_and_compare = grader.sympy_symbolic_eq


def _symbolically_equal(a: Any, b: Any) -> bool:
    """Use math-verify's simplification of the difference only if the numeric comparison is undecided."""
    return scalars_equal(a, b) is None and bool(_simplify_and_compare(a, b))


grader.sympy_numeric_eq = _numerically_equal
grader.sympy_symbolic_eq = _symbolically_equal


@lru_cache(maxsize=4096)
def read_expression(text: str) -> Any:
    """Parse a whole answer in LaTeX or plain notation to a sympy object; None if it is not mathematics.

    math-verify's ``parse`` would search an unreadable answer for a number: ``1, 2, \\ldots, n`` would be 2. Powers and the like stay
    unevaluated. Cached, because the responses of a group share their ground truth.
    """
    try:
        latex = normalize_latex(without_unit(text), config=_SPELLING)
        return next(read for read in map(_read, dict.fromkeys((latex, get_last_eq(latex)))) if read is not None)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - nothing could be read, or the search for the last equation fails
        return None


def _read(latex: str) -> Any:
    try:
        expression = latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=_CASE_SENSITIVE,
        )
        derivatives = expression.atoms(sympy.Derivative) if isinstance(expression, sympy.Basic) else set()
        # dy/dx of a plain symbol would be evaluated to 0, and all equations for it would have the same solutions
        names = {one: sympy.Symbol(str(one)) for one in derivatives if isinstance(one.expr, sympy.Symbol)}
        return expression.xreplace(names) if names else expression
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the parser raises plain Exceptions for syntax errors, sympy various types
        return None


def expressions_equal(truth: Any, answer: Any) -> bool:
    """Return whether two sympy objects are equal. An interval may equal an inequality.

    Objects that math-verify cannot compare (it raises TypeError for a set minus a symbol) are unequal.
    """
    try:
        if (quick := relations_equal(truth, answer)) is not None:
            return quick
        if isinstance(truth, sympy.Expr) and isinstance(answer, sympy.Expr):
            quick = scalars_equal(truth, answer)
            if quick is not None:
                return quick
        return bool(verify(truth, answer, allow_set_relation_comp=True, timeout_seconds=None))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - an answer that math-verify cannot compare is unequal
        return False


def is_rounded(decimal: Fraction, places: int, value: Any) -> bool:
    """Return whether an expression is a real number that rounds to ``decimal`` with ``places`` decimals."""
    try:
        side = value.rhs if isinstance(value, sympy.Eq) else value
        return isinstance(side, sympy.Expr) and rounds_to(sympy.Rational(decimal.numerator, decimal.denominator), places, side)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return False
