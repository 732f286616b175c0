"""Cheap questions about sympy expressions that spare the expensive ones: how large are the numbers that evaluating an
expression would produce, and are two expressions, or two linear equations, clearly equal or clearly not?"""

from __future__ import annotations

import math

import sympy  # type: ignore[import-untyped]


def has_more_digits_than(expression: object, digits: int) -> bool:
    """Whether some power, factorial or binomial inside a (lazy) sympy expression is a number of more than ``digits``
    digits before or after the point. Expressions with symbols in them are not numbers and do not count."""
    if not isinstance(expression, sympy.Basic):
        return False
    kinds = (sympy.Pow, sympy.factorial, sympy.binomial)
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, kinds):
            size = _log10(node)
            if size is not None and abs(size) > digits:
                return True
    return False


def _log10(node: sympy.Basic) -> float | None:
    """log10 of the absolute value, roughly; inf if it is beyond floats; None if it is unknown or the value is 0."""
    if isinstance(node, sympy.Integer):  # before floats come in: an integer may have any number of digits
        magnitude = abs(int(node))
        return math.log10(magnitude) if magnitude else None
    if isinstance(node, sympy.Rational):
        return math.log10(abs(node.p)) - math.log10(node.q)
    if node.is_number and not node.args:
        value = abs(float(node)) if node.is_real and node.is_finite else 0.0
        return math.log10(value) if value > 0 else None
    if isinstance(node, sympy.UnevaluatedExpr):
        return _log10(node.args[0])
    if isinstance(node, sympy.Pow):
        base, exponent = _log10(node.args[0]), _value(node.args[1])
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
        factors = [_log10(factor) for factor in node.args]
        return None if None in factors else sum(factor for factor in factors if factor is not None)
    if isinstance(node, sympy.Add):
        terms = [_log10(term) for term in node.args]
        return None if None in terms else max(term for term in terms if term is not None)
    return None


def _value(node: sympy.Basic) -> float | None:
    """The absolute value as a float, inf if it is beyond floats."""
    size = _log10(node)
    if size is None:
        return None
    return 10.0**size if size < 300 else math.inf


def _product(a: float, b: float) -> float:
    """a * b, where 0 * inf is 0 (a power of 1 is 1, however large the exponent)."""
    return 0.0 if a == 0 or b == 0 else a * b


_UNLIKE_NUMBERS = frozenset({"e", "E", "i", "I", "pi"})
"""Names of symbols that math-verify identifies with constants."""


def compare_scalars(a: object, b: object, tolerance: float) -> bool | None:
    """A quick verdict on two scalar expressions in the same symbols, or None where it takes more than this.

    False: they differ by more than ``tolerance`` at one arbitrary point. True: their difference expands to zero. Either
    spares the attempt to simplify the difference, which takes most of the time that an answer's grading can take.
    """
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)) or a.is_Symbol or b.is_Symbol:
        return None
    symbols = sorted(a.free_symbols, key=str)
    if a.free_symbols != b.free_symbols or any(str(symbol) in _UNLIKE_NUMBERS for symbol in symbols):
        return None
    if a.has(sympy.UnevaluatedExpr) or b.has(sympy.UnevaluatedExpr):  # percentages: 50 % answers 50 as well as 0.5
        return None
    point = {symbol: sympy.Rational(7 + 4 * index, 5 + 2 * index) for index, symbol in enumerate(symbols)}
    try:
        difference = complex((a.subs(point) - b.subs(point)).evalf(20))
        if math.isfinite(abs(difference)) and abs(difference) > tolerance:
            return False
        return True if sympy.expand(a - b) == 0 else None
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None  # no number comes out, infinity for instance


def compare_linear_equations(a: object, b: object) -> bool | None:
    """Whether two linear equations in the same symbols have the same solutions; None for anything else.

    Spares solving both for each symbol: their coefficients are proportional or they are not.
    """
    if not (isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq)) or a.free_symbols != b.free_symbols:
        return None
    symbols = sorted(a.free_symbols, key=str)
    if not symbols or any(str(symbol) in _UNLIKE_NUMBERS for symbol in symbols):
        return None
    polynomials = [sympy.expand(side.lhs - side.rhs).as_poly(*symbols) for side in (a, b)]
    if any(polynomial is None or polynomial.total_degree() != 1 for polynomial in polynomials):
        return None
    monomials = [*symbols, sympy.S.One]
    ours, theirs = ([polynomial.coeff_monomial(monomial) for monomial in monomials] for polynomial in polynomials)
    pivot = next(index for index, coefficient in enumerate(ours) if coefficient != 0)
    if not all(coefficient.is_Rational for coefficient in [*ours, *theirs]):
        return None  # floats and roots: whether products are equal is a matter of rounding or simplification
    return theirs[pivot] != 0 and all(x * theirs[pivot] == y * ours[pivot] for x, y in zip(ours, theirs, strict=True))
