"""Estimate the size of the numbers in a sympy expression without evaluating it."""

from __future__ import annotations

import math

import sympy  # type: ignore[import-untyped]

_SYMBOL = math.log10(1.5)


def has_more_digits_than(expression: object, digits: int) -> bool:
    """Return whether a power, factorial or binomial in an unevaluated expression has over ``digits`` digits before or after the point.

    A symbol counts as 1.5, because powers of symbols are evaluated at points of that size.
    """
    if not isinstance(expression, sympy.Basic):
        return False
    kinds = (sympy.Pow, sympy.factorial, sympy.binomial)
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, kinds):
            size = log10_of(node)
            if size is not None and abs(size) > digits:
                return True
    return False


def log10_of(node: sympy.Basic) -> float | None:
    """Estimate log10 of the absolute value; inf if it exceeds floats, None if it is unknown or the value is 0."""
    if isinstance(node, sympy.Symbol):
        return _SYMBOL
    if isinstance(node, sympy.Integer):  # no conversion to float: an integer may have any number of digits
        magnitude = abs(int(node))
        return math.log10(magnitude) if magnitude else None
    if isinstance(node, sympy.Rational):
        return math.log10(abs(node.p)) - math.log10(node.q)
    if node.is_number and not node.args:
        value = abs(float(node)) if node.is_real and node.is_finite else 0.0
        return math.log10(value) if value > 0 else None
    if isinstance(node, sympy.UnevaluatedExpr):
        return log10_of(node.args[0])
    if isinstance(node, sympy.Pow):
        base, exponent = log10_of(node.args[0]), _value(node.args[1])
        return None if base is None or exponent is None else _product(base, exponent)
    if isinstance(node, sympy.factorial):
        count = _value(node.args[0])
        return None if count is None or count < 2 else _product(count, math.log10(count / math.e) if count < math.inf else 1.0)
    if isinstance(node, sympy.binomial):
        total, part = _value(node.args[0]), _value(node.args[1])
        if total is None or part is None or not 1 <= part < total:
            return None
        return _product(min(part, total - part), math.log10(total / min(part, total - part))) if total < math.inf else total
    if isinstance(node, sympy.Mul):
        factors = [log10_of(factor) for factor in node.args]
        return None if None in factors else sum(factor for factor in factors if factor is not None)
    if isinstance(node, sympy.Add):
        terms = [log10_of(term) for term in node.args]
        return None if None in terms else max(term for term in terms if term is not None)
    return None


def _value(node: sympy.Basic) -> float | None:
    """Return the absolute value as a float, inf if it exceeds floats."""
    size = log10_of(node)
    if size is None:
        return None
    return 10.0**size if size < 300 else math.inf


def _product(a: float, b: float) -> float:
    """Return a * b with 0 * inf = 0 (a power of 1 is 1 for any exponent)."""
    return 0.0 if a == 0 or b == 0 else a * b
