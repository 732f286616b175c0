"""Compare sympy scalars (numbers and functions of symbols) and relations between polynomials.

Numbers are compared by their difference, evaluated with enough digits to distinguish it from zero, so that neither tiny nor huge values
are equal merely because they are close. Functions are compared by their values at several points.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]

from vapo_mcore.rewards.magnitude import log10_of
from vapo_mcore.rewards.roundings import is_rounding

_DIGITS = 80
"""A difference is zero if it is zero to this many digits, relative to the larger of 1 and the values."""

_POINTS = (((7, 4), (5, 2)), ((-9, -4), (5, 3)), ((-13, 11), (7, 2)), ((47, 30), (3, 2)), ((-83, -16), (3, 4)))
"""Values of symbol number i are (a + b i) / (c + d i)."""
_UNEVALUATED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)


def scalars_equal(a: Any, b: Any) -> bool | None:
    """Return whether two scalar expressions are real at the same points and equal there; None if undecided.

    A decimal with at least 6 decimals equals values that round to it.
    """
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return None
    try:
        ours, theirs = exact(a), exact(b)
        difference = ours - theirs
        if difference.is_zero:
            return True
        if difference.free_symbols:
            return _functions_equal(ours, theirs, difference)
        verdict = _is_zero(difference, ours, theirs)
        if verdict is False:
            return _rounds_to(a, theirs) or _rounds_to(b, ours)
        return verdict
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None  # not a finite number


@lru_cache(maxsize=4096)
def exact(expression: Any) -> Any:
    """Replace decimals by exact fractions and the letters e and i by the constants."""
    replaced = {}
    for atom in expression.atoms(sympy.Float, sympy.Symbol):
        if isinstance(atom, sympy.Float):
            replaced[atom] = sympy.Rational(str(atom))
        elif str(atom) in _CONSTANTS:
            replaced[atom] = _CONSTANTS[str(atom)]
    expression = expression.xreplace(replaced) if replaced else expression
    expression = expression.doit() if expression.has(sympy.UnevaluatedExpr, *_UNEVALUATED) else expression
    return with_real_roots(expression)


def with_real_roots(expression: Any) -> Any:
    """Replace odd roots of negative numbers by the real ones: ``\\sqrt[3]{-27}`` is -3. Expressions with i keep the principal root."""
    roots = {power for power in expression.atoms(sympy.Pow) if power.exp.is_Rational and power.exp.q > 1 and power.exp.q % 2}
    if not roots or expression.has(sympy.I):
        return expression
    real = {
        power: (-1) ** (power.exp.p % 2) * (-power.base) ** power.exp
        for power in roots
        if not power.base.free_symbols and power.base.is_negative
    }
    return expression.xreplace(real) if real else expression


_CONSTANTS = {"e": sympy.E, "i": sympy.I, "pi": sympy.pi}


def _is_zero(difference: Any, *values: Any) -> bool | None:
    """Return whether a difference of numbers is zero; None if it cannot be evaluated."""
    if difference.is_Rational:
        return bool(difference == 0)
    sizes = [size for value in values if (size := log10_of(value)) is not None]
    extra = int(min(max([0.0, *sizes]), 20_000))
    value = difference.evalf(15, maxn=_DIGITS + extra)
    if value.has(sympy.nan, sympy.zoo, sympy.oo) or not value.is_number:
        return None
    parts = value.as_real_imag()
    if not all(part.is_Number for part in parts):
        return None
    return not any(_is_significant(part) for part in parts)


def _is_significant(number: Any) -> bool:
    """Return whether sympy determined at least one digit; otherwise it marks the value with a precision of 1 bit."""
    return bool(number != 0) and not (number.is_Float and number._prec == 1)


def _functions_equal(a: Any, b: Any, difference: Any) -> bool | None:
    if difference.is_polynomial() and sympy.expand(difference) == 0:
        return True
    symbols = sorted(difference.free_symbols, key=str)
    is_complex = a.has(sympy.I) or b.has(sympy.I)
    compared = 0
    points = _POINTS if difference.has(sympy.floor, sympy.ceiling, sympy.Mod) else _POINTS[:3]
    for (up, up_step), (down, down_step) in points:
        point = {symbol: sympy.Rational(up + up_step * n, down + down_step * n) for n, symbol in enumerate(symbols)}
        value = _value(difference, point)
        if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
            continue
        if not any(_is_significant(part) for part in value.as_real_imag()):
            compared += 1
            continue
        reals = [is_complex or not _is_significant(_value(side, point).as_real_imag()[1]) for side in (a, b)]
        if any(reals):
            return False
    return True if compared else None


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    odd_roots = any(power.exp.is_Rational and power.exp.q > 1 and power.exp.q % 2 for power in expression.atoms(sympy.Pow))
    if odd_roots:  # of a number that is negative at this point
        expression = with_real_roots(expression.xreplace(point))
    return expression.evalf(15, subs=point, maxn=_DIGITS)


def _rounds_to(decimal: Any, value: Any) -> bool:
    """Return whether ``decimal`` is a sufficiently precise decimal to which ``value`` rounds."""
    if not isinstance(decimal, sympy.Float):
        return False
    digits = str(decimal).rstrip("0")
    return "e" not in digits and rounds_to(sympy.Rational(digits), len(digits.partition(".")[2]), value)


def rounds_to(decimal: Any, places: int, value: Any) -> bool:
    """Return whether a real number rounds to ``decimal`` with ``places`` decimals, and the decimal is sufficiently precise."""
    scaled = decimal * 10**places
    found = exact(value).evalf(60 + places)
    return bool(found.is_real) and is_rounding(Fraction(scaled.p, scaled.q), places, found * 10**places)


def same_progression(one: Any, other: Any, name: str) -> bool:
    """Return whether ``a + p k`` and ``b + q k`` run through the same values for all integers k (the symbol called ``name``)."""
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return False
    one, other = exact(one), exact(other)
    (p, a), (q, b) = (
        (sympy.expand(side).coeff(symbol, 1), side.subs(symbol, 0)) if (symbol := _symbol(side, name)) else (sympy.Integer(0), side)
        for side in (one, other)
    )
    if any(step.free_symbols or step.is_zero or not step.is_number for step in (p, q)):
        return False
    if not all(
        scalars_equal(side, start + step * symbol) for side, start, step in ((one, a, p), (other, b, q)) if (symbol := _symbol(side, name))
    ):
        return False  # not linear
    if not (scalars_equal(p, q) or scalars_equal(p, -q)):
        return False
    apart = sympy.expand((a - b) / p)
    return not apart.free_symbols and bool(apart.is_real) and scalars_equal(apart, sympy.Integer(round(float(apart)))) is True


def _symbol(expression: Any, name: str) -> Any:
    return next((symbol for symbol in expression.free_symbols if str(symbol) == name), None)


_MIRRORED = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le, sympy.Lt: sympy.Gt, sympy.Le: sympy.Ge, sympy.Eq: sympy.Eq}


def relations_equal(a: Any, b: Any) -> bool | None:
    """Return whether two equations or inequalities are equal up to a factor; None if undecided.

    Handles polynomials with rational coefficients in the same symbols. For linear ones the result is decisive; for others it is True or
    None.
    """
    kinds = type(a), type(b)
    if kinds == (sympy.Eq, sympy.Eq) and not a.free_symbols and not b.free_symbols:  # of numbers: both true, or both false, says nothing
        return bool(scalars_equal(a.lhs, b.lhs) and scalars_equal(a.rhs, b.rhs))
    if kinds[0] not in _MIRRORED or kinds[1] not in _MIRRORED or a.free_symbols != b.free_symbols or not a.free_symbols:
        return None
    sides = (a.lhs, a.rhs, b.lhs, b.rhs)
    if not all(isinstance(side, sympy.Expr) for side in sides) or any(str(symbol) in _CONSTANTS for symbol in a.free_symbols):
        return None
    symbols = sorted(a.free_symbols, key=str)
    ours, theirs = (sympy.expand(exact(side.lhs) - exact(side.rhs)).as_poly(*symbols) for side in (a, b))
    if ours is None or theirs is None or not all(c.is_Rational for c in [*ours.coeffs(), *theirs.coeffs()]):
        return None  # irrational coefficients: equality would need simplification
    if ours.is_zero or theirs.is_zero:
        return None
    factor = ours.LC() / theirs.LC()
    same_kind = kinds[0] is kinds[1] if factor > 0 or kinds[0] is sympy.Eq else kinds[0] is _MIRRORED[kinds[1]]
    if (ours - theirs * factor).is_zero and same_kind:
        return True
    return False if ours.total_degree() == theirs.total_degree() == 1 else None
