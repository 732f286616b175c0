"""The ``math`` verifiers: is the answer of a response mathematically equal to the ground truth?

Equality is decided by math-verify (LaTeX to sympy, then numeric and symbolic comparison). Around it:

- Plain integers, decimals and fractions are compared exactly, without it (same verdict, a hundred times as fast).
- Words are compared as words.
- Answers that no reader would take for one (very long, deeply nested, a number with more than 100,000 digits) are
  wrong, without being evaluated.

This module is cheap to import; sympy and math-verify come with the first answer that needs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from vapo_mcore.rewards.extraction import answer_line, marked_answer, marked_answer_or_last_number
from vapo_mcore.rewards.normalization import as_words, normalize_answer, units_differ, unwrap_text
from vapo_mcore.rewards.quantities import as_union, number_of, quantities_equal
from vapo_mcore.rewards.types import UngradableError

MAX_ANSWER_LENGTH = 1000
MAX_NESTING = 25
MAX_DIGITS = 100_000

# At most 9 digits before the point and 6 behind: there math-verify's rounding of floats to 6 places changes nothing.
_DECIMAL = re.compile(r"[-+]?(?:\d{1,9}\.\d{1,6}|\.\d{1,6})")
_INTEGER = re.compile(r"[-+]?\d{1,1000}")
_COMMAS = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,6})?)")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?:\\[dt]?frac\{(?P<n1>-?\d{1,100})\}\{(?P<d1>-?\d{1,100})\}"
    r"|\\[dt]?frac(?P<n2>\d)(?P<d2>\d)|(?P<n3>\d{1,100})/(?P<d3>\d{1,100}))"
)
_CLEARLY_APART = 2e-6
"""Numbers further apart than this never round to the same 6 decimals."""


def math(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """1 if the last ``\\boxed{...}`` or ``<answer>...</answer>`` equals the ground truth; 0 if nothing is marked.

    Raises:
        UngradableError: the ground truth cannot be read as mathematics.
    """
    return float(is_equal(marked_answer(response), ground_truth))


def math_last_number(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """As ``math``, but where nothing is marked the last number of the response is its answer."""
    return float(is_equal(marked_answer_or_last_number(response), ground_truth))


def math_answer_line(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """As ``math``, with the answer that follows the last ``Answer:`` of the response."""
    return float(is_equal(answer_line(response), ground_truth))


def stated_answer_line(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """That answer in a normal spelling, as of ``stated_answer``."""
    return _spelled(answer_line(response))


def stated_answer(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """The marked answer in a normal spelling: plain numbers by value, words without regard to case; None without one."""
    return _spelled(marked_answer(response))


def stated_answer_or_last_number(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """As ``stated_answer``, but where nothing is marked the last number of the response is its answer."""
    return _spelled(marked_answer_or_last_number(response))


def _spelled(answer: str | None) -> str | None:
    if not answer:
        return None
    if _is_outlandish(answer):  # never read as mathematics
        return answer[:MAX_ANSWER_LENGTH]
    normal = normalize_answer(answer)
    number = _plain_number(normal)
    if number is not None:
        return str(number.value)
    return as_words(normal) or "".join(normal.split()) or None


def is_equal(answer: str | None, ground_truth: str) -> bool:
    """Whether an extracted answer equals the ground truth. Not symmetric: ``x=5`` answers ``5``, ``5x`` does not.

    Raises:
        UngradableError: the ground truth cannot be read as mathematics, whatever the answer is.
    """
    truth = _normalized(ground_truth)
    truth_number = _plain_number(truth)
    truth_words = None if truth_number is not None else as_words(truth)
    truth_expression = None
    if truth_number is None and truth_words is None:
        truth_expression = _parsed_truth(truth, ground_truth)
    if not answer or _is_outlandish(answer):
        return False
    same_quantity = quantities_equal(answer, ground_truth)
    if same_quantity is not None:
        return same_quantity
    if units_differ(answer, ground_truth):
        return False
    candidate = normalize_answer(answer)
    if candidate == truth:
        return True
    same_in_bases = _based_equal(candidate, truth)
    if same_in_bases is not None:
        return same_in_bases
    if "mod" not in truth:
        candidate = _without_modulus(candidate)
    if r"\cup" in truth:
        candidate = as_union(candidate)
    if truth_words is not None:
        return _listed(" ".join(unwrap_text(candidate).split()).casefold()) == _listed(truth_words)
    if truth_number is not None:
        if _is_percentage(candidate, truth):
            return True
        if _is_false_equation(candidate):
            return False
        number = _plain_number(number_of(answer) or candidate)
        verdict = None if number is None else _numbers_equal(truth_number, number)
        if verdict is not None:
            return verdict
        truth_expression = _parsed_truth(truth, ground_truth)
    if _is_percentage(candidate, truth):
        return True
    by_parts = _tuples_equal(candidate, truth)
    if by_parts is not None:
        return by_parts
    if as_words(candidate) is not None and len(unwrap_text(candidate)) > 1:
        return False
    return _equals_expression(candidate, truth_expression)


def _listed(words: str) -> str:
    """Words with one spelling of the commas between them."""
    return re.sub(r"\s*,\s*", ",", words)


@lru_cache(maxsize=4096)
def _normalized(ground_truth: str) -> str:
    return normalize_answer(ground_truth)


@dataclass(frozen=True)
class _Number:
    """A number written plainly. ``is_decimal``: with a decimal point, so that it may stand for a rounded value."""

    value: Fraction
    is_decimal: bool


def _plain_number(text: str) -> _Number | None:
    """A plain integer, decimal or fraction of integers; None for anything else, which math-verify must read."""
    if grouped := _COMMAS.fullmatch(text):
        text = grouped[1] + grouped[2].replace(",", "")
    if _INTEGER.fullmatch(text):
        return _Number(Fraction(int(text)), False)
    if _DECIMAL.fullmatch(text):
        return _Number(Fraction(text), True)
    if match := _FRACTION.fullmatch(text):
        numerator = int(match["n1"] or match["n2"] or match["n3"])
        denominator = int(match["d1"] or match["d2"] or match["d3"])
        if denominator != 0:
            return _Number(Fraction(-numerator if match["sign"] == "-" else numerator, denominator), False)
    return None


def _numbers_equal(a: _Number, b: _Number) -> bool | None:
    """None: a fraction and a decimal so close that rounding decides; math-verify must."""
    if a.value == b.value:
        return True
    if a.is_decimal == b.is_decimal or abs(a.value - b.value) > _CLEARLY_APART:
        return False
    return None


# A letter alone is a term of a sequence, such as Fibonacci's F_{17}, and no digit.
_BASED = re.compile(r"(-?)\(?([0-9]|[0-9A-Fa-f]{2,100})\)?_(?:(\d)|\{(?:\\text\{)?(\d{1,2})\}?\})")


def _based_equal(candidate: str, truth: str) -> bool | None:
    """Whether two numbers in stated bases are one; None: not both of this form, or digits that their base does not have.

    math-verify drops the base, so that ``12_8`` would equal ``12_7``.
    """
    numbers = []
    for text in (candidate, truth):
        match = _BASED.fullmatch(text)
        try:
            if match is None:
                return None
            numbers.append(int(match[1] + match[2], int(match[3] or match[4])))
        except ValueError:
            return None
    return numbers[0] == numbers[1]


_PERCENTAGE = re.compile(r"(.{1,40}?)\s*\\?%")


def _is_percentage(candidate: str, truth: str) -> bool:
    """Whether one is a percentage and the other its number: ``12.5 %`` is 12.5 as well as 0.125.

    math-verify takes whole percentages so, but not those with a decimal point.
    """
    ours, theirs = _PERCENTAGE.fullmatch(candidate), _PERCENTAGE.fullmatch(truth)
    if (ours is None) == (theirs is None):
        return False
    share = _plain_number((ours or theirs)[1])  # type: ignore[index]
    other = _plain_number(truth if ours else candidate)
    return share is not None and other is not None and other.value in (share.value, share.value / 100)


_ROUNDED_WITHIN = Fraction(1, 50)


def _is_false_equation(candidate: str) -> bool:
    """``3 = 4``: math-verify looks at the last number alone. ``22/7 = 3.14`` is a rounding: with a decimal, 2 % apart is no fault."""
    numbers = [_plain_number(side.strip()) for side in candidate.split("=")] if "=" in candidate else []
    for one, other in pairwise(numbers):
        if one is not None and other is not None:
            rounding = _ROUNDED_WITHIN * abs(one.value) if one.is_decimal or other.is_decimal else 0
            if abs(one.value - other.value) > rounding:
                return True
    return False


_MODULUS = re.compile(
    r"(?:[a-z]\s*(?:\\equiv|\u2261|=)\s*)?(.{1,60}?)\s*(?:\\pmod\s*\{?\s*\w+\s*\}?|(?:\\)?\(\s*(?:\\b?mod|mod)\s*\w+\s*\))"
)


def _without_modulus(candidate: str) -> str:
    """``x \\equiv 12 \\pmod{17}`` as ``12``, where the ground truth states no modulus."""
    match = _MODULUS.fullmatch(candidate) if "mod" in candidate else None
    return candidate if match is None else match[1]


_BRACKETED = re.compile(r"(?:\\left\s*)?([(\[])([^()\[\]{}=|;]*,[^()\[\]{}=|;]*?)(?:\\right\s*)?([)\]])")


def _tuples_equal(candidate: str, truth: str) -> bool | None:
    """Intervals and tuples in the same kind of brackets are equal if their parts are; None: not of this form.

    Reading ``(1,2]`` takes math-verify twenty times as long as reading its two ends.
    """
    ours, theirs = _BRACKETED.fullmatch(candidate), _BRACKETED.fullmatch(truth)
    if ours is None or theirs is None or (ours[1], ours[3]) != (theirs[1], theirs[3]):
        return None
    parts, truth_parts = ours[2].split(","), theirs[2].split(",")
    if len(parts) != len(truth_parts) or not all(part.strip() for part in truth_parts):
        return None
    return all(is_equal(part, truth_part) for part, truth_part in zip(parts, truth_parts, strict=True))


_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)")


def _is_outlandish(answer: str) -> bool:
    if len(answer) > MAX_ANSWER_LENGTH:
        return True
    if any(len(match[1]) > 5 for match in _BINOMIAL.finditer(answer)):  # worked out by the parser, before its digits can be counted
        return True
    depth = deepest = 0
    for character in answer:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest > MAX_NESTING


def _parsed_truth(truth: str, ground_truth: str) -> Any:
    from vapo_mcore.rewards.reading import read_expression
    from vapo_mcore.rewards.shortcuts import has_more_digits_than

    shown = ground_truth if len(ground_truth) <= 100 else ground_truth[:100] + "..."
    expression = read_expression(truth)
    if expression is None:
        raise UngradableError(
            f"ground truth {shown!r} cannot be read as mathematics; the verifiers 'exact' and 'multiple_choice' compare text"
        )
    if has_more_digits_than(expression, MAX_DIGITS):
        raise UngradableError(f"ground truth {shown!r} contains a number of more than {MAX_DIGITS:,} digits, which cannot be evaluated")
    return expression


def _equals_expression(candidate: str, truth: Any) -> bool:
    from vapo_mcore.rewards.reading import expressions_equal, read_expression
    from vapo_mcore.rewards.shortcuts import has_more_digits_than

    expression = read_expression(candidate)
    if expression is None or has_more_digits_than(expression, MAX_DIGITS):
        return False
    return expressions_equal(truth, expression, _CLEARLY_APART)


def warm_up() -> None:
    """Imports sympy and grades one answer of each common kind, so that parsers and caches are built beforehand."""
    pairs = [(r"\frac{2}{3}\pi", r"\frac{\pi}{3}"), ("x+1", "x-1"), (r"\{1,2\}", "[1,2)"), ("0.333333", r"\frac13")]
    for answer, truth in [*pairs, (r"\sin^2 x + \cos^2 x", "1"), ("y=x", "2y=2x")]:
        is_equal(answer, truth)
