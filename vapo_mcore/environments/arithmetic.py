"""Exact arithmetic on model-written text: sums, products and brackets of decimal numbers, evaluated without executing code."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_DIGITS = 40
MAX_DEPTH = 25

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))")
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})


class ArithmeticFault(ValueError):
    """The text is not arithmetic, or too large to be evaluated; the message gives the reason."""


def evaluate(text: str) -> Fraction:
    """Evaluate an expression of numbers, ``+ - * /`` (also their typographic signs) and brackets, with the usual precedence.

    Raises ArithmeticFault for anything else, for division by zero, and for expressions of more than 200 characters, numbers of more than
    40 digits or more than 25 nested brackets or signs.
    """
    if len(text) > MAX_LENGTH:
        raise ArithmeticFault(f"the expression is longer than {MAX_LENGTH} characters")
    return _Parser(_tokens(text.translate(_SPELLINGS))).result()


def written(value: Fraction) -> str:
    """Format a number as an integer, a decimal of at most 12 places if that is exact, else a fraction ``p/q``."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**12
    if scaled.denominator == 1:
        sign, digits = ("-" if scaled < 0 else ""), f"{abs(scaled.numerator):013d}"
        return f"{sign}{digits[:-12]}.{digits[-12:].rstrip('0')}"
    return f"{value.numerator}/{value.denominator}"


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    end = len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticFault(f"{text[position:].strip()[:20]!r} is not arithmetic")
        if match[1] and len(match[1]) > MAX_DIGITS:
            raise ArithmeticFault(f"a number has more than {MAX_DIGITS} digits")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens; ``depth`` bounds the recursion."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def result(self) -> Fraction:
        value = self._sum(0)
        if self.position < len(self.tokens):
            raise ArithmeticFault(f"{self.tokens[self.position]!r} was not expected")
        return value

    def _next_is(self, *symbols: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position] in symbols

    def _take(self) -> str:
        if self.position == len(self.tokens):
            raise ArithmeticFault("the expression is incomplete")
        self.position += 1
        return self.tokens[self.position - 1]

    def _sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._next_is("+", "-"):
            sign = self._take()
            term = self._product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._next_is("*", "/"):
            symbol = self._take()
            factor = self._factor(depth)
            if symbol == "/" and factor == 0:
                raise ArithmeticFault("division by zero")
            value = value * factor if symbol == "*" else value / factor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ArithmeticFault(f"more than {MAX_DEPTH} nested brackets or signs")
        token = self._take()
        if token in ("+", "-"):
            value = self._factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self._sum(depth + 1)
            if self._take() != ")":
                raise ArithmeticFault("a bracket is not closed")
            return value
        if token in ("*", "/", ")"):
            raise ArithmeticFault(f"{token!r} was not expected")
        return Fraction(token)
