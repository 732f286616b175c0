"""The ``math`` verifiers: compare the answer of a response with the ground truth mathematically.

math-verify decides equality (LaTeX to sympy, then numeric and symbolic comparison), except that:

- plain integers, decimals and fractions are compared exactly without it (same verdict, a hundred times as fast);
- words are compared as words;
- extreme answers (very long, deeply nested, a number with more than 100,000 digits) are wrong without being evaluated.

Importing this module is cheap; sympy and math-verify are imported for the first answer that needs them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from vapo_mcore.rewards import families, forms
from vapo_mcore.rewards.extraction import answer_line, marked_answer, marked_answer_or_last_number
from vapo_mcore.rewards.normalization import as_words, normalize_answer, units_differ, unwrap_text
from vapo_mcore.rewards.quantities import as_union, measured, number_of, quantities_equal
from vapo_mcore.rewards.roundings import is_rounding
from vapo_mcore.rewards.types import UngradableError

MAX_ANSWER_LENGTH = 1000
MAX_NESTING = 12
MAX_SUBSCRIPTS = 2
MAX_DIGITS = 100_000

_DECIMAL = re.compile(r"[-+]?(?:\d{1,300}\.\d{0,300}|\.\d{1,300})")
_INTEGER = re.compile(r"[-+]?\d{1,1000}")
_SCIENTIFIC = re.compile(r"([-+]?\d{1,30}(?:\.\d{1,30})?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\d{1,3})\s*\}?")
_COMMAS = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3}){1,5}(?:\.\d{1,6})?)")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?:\\[dt]?frac\{(?P<n1>-?\d{1,100})\}\{(?P<d1>-?\d{1,100})\}"
    r"|\\[dt]?frac(?P<n2>\d)(?P<d2>\d)|(?P<n3>\d{1,100})/(?P<d3>\d{1,100}))"
)


def math(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if the last ``\\boxed{...}`` or ``<answer>...</answer>`` equals the ground truth, else 0, also if nothing is marked.

    Raises:
        UngradableError: the ground truth cannot be read as mathematics.
    """
    return float(is_equal(marked_answer(response), ground_truth))


def math_last_number(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Grade like ``math``, but use the last number of the response if nothing is marked."""
    return float(is_equal(marked_answer_or_last_number(response), ground_truth))


def math_answer_line(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Grade like ``math``, with the answer after the last ``Answer:`` of the response."""
    return float(is_equal(answer_line(response), ground_truth))


def stated_answer_line(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the answer after the last ``Answer:``, normalised like ``stated_answer``."""
    return _spelled(answer_line(response))


def stated_answer(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the marked answer, normalised: plain numbers by value, words case-folded; None without a marked answer."""
    return _spelled(marked_answer(response))


def stated_answer_or_last_number(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the answer like ``stated_answer``, but use the last number of the response if nothing is marked."""
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
    """Return whether an extracted answer equals the ground truth. Not symmetric: ``x=5`` answers ``5``, but ``5x`` does not.

    Raises:
        UngradableError: the ground truth cannot be read as mathematics; raised for any answer.
    """
    truth = _normalized(ground_truth)
    truth_number = _plain_number(truth)
    truth_words = None if truth_number is not None else as_words(truth)
    if truth_number is None and truth_words is None:
        _check_readable(truth, ground_truth)
    if not answer or _is_outlandish(answer):
        return False
    same_quantity = quantities_equal(answer, ground_truth)
    if same_quantity is not None:
        return same_quantity
    ours, theirs = measured(answer), measured(ground_truth)
    if ours is not None and theirs is not None:
        factor = ours[1] / theirs[1]
        scaled = ours[0] if factor == 1 else rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}\left({ours[0]}\right)"
        return ours[2] == theirs[2] and _part_equal(scaled, theirs[0])
    if units_differ(answer, ground_truth):
        return False
    candidate = as_union(normalize_answer(answer))
    if candidate == truth or _is_same_letter(candidate, truth):
        return True
    if truth_words is not None:
        return _listed(" ".join(unwrap_text(candidate).split()).casefold()) == _listed(truth_words)
    if truth_number is not None:
        number = _plain_number(number_of(answer) or candidate)
        if number is not None:
            return _numbers_equal(truth_number, number)
        if _is_false_equation(candidate):
            return False
    for form in _FORMS:
        verdict = form(candidate, truth, _part_equal)
        if verdict is not None:
            return verdict
    if as_words(candidate) is not None and len(unwrap_text(candidate)) > 1:
        return False
    return _equals_expression(number_of(answer) or candidate if truth_number else candidate, truth, truth_number)


_FORMS = (
    forms.based_equal,
    forms.percentages_equal,
    forms.congruences_equal,
    forms.assigned_equal,
    families.conditions_equal,
    forms.dotted_equal,
    forms.names_equal,
    forms.ratios_equal,
    forms.tuples_equal,
    forms.points_equal,
    forms.lists_equal,
)


def _is_same_letter(candidate: str, truth: str) -> bool:
    """Return whether both are the same single letter, which names a choice: its case does not matter there. In expressions it does."""
    one, other = unwrap_text(candidate), unwrap_text(truth)
    return len(one) == len(other) == 1 and one.isalpha() and one.casefold() == other.casefold()


def _part_equal(part: str, truth_part: str) -> bool:
    """Apply ``is_equal`` to parts of an answer and of a ground truth; an unreadable part of the ground truth only equals itself."""
    try:
        return is_equal(part, truth_part)
    except UngradableError:
        return "".join(normalize_answer(part).split()) == "".join(_normalized(truth_part).split())


def _listed(words: str) -> str:
    """Normalise the whitespace around commas."""
    return re.sub(r"\s*,\s*", ",", words)


_BARE_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?:text|mathrm|[lgn]eq?|neq|begin)(?![a-z])|[<>]")


@lru_cache(maxsize=4096)
def _normalized(ground_truth: str) -> str:
    text = as_union(normalize_answer(ground_truth))
    if "=" in text and not _BARE_LETTER.search(text):
        return text.rpartition("=")[2].strip()  # ``3 + 5 = 8`` asks for 8
    return text


@dataclass(frozen=True)
class _Number:
    """A plainly written number. ``places``: digits after its decimal point; with enough of them it matches values that round to it."""

    value: Fraction
    places: int = 0

    @property
    def is_decimal(self) -> bool:
        return self.places > 0


def _plain_number(text: str) -> _Number | None:
    """Parse a plain integer, decimal or fraction of integers; return None for anything else, which math-verify must parse."""
    if grouped := _COMMAS.fullmatch(text):
        text = grouped[1] + grouped[2].replace(",", "")
    if _INTEGER.fullmatch(text):
        return _Number(Fraction(int(text)))
    if _DECIMAL.fullmatch(text):
        return _Number(Fraction(text), len(text.partition(".")[2]))
    if power := _SCIENTIFIC.fullmatch(text):
        exponent = int(power[2])
        return _Number(Fraction(power[1]) * Fraction(10) ** exponent, max(0, len(power[1].partition(".")[2]) - exponent))
    if match := _FRACTION.fullmatch(text):
        numerator = int(match["n1"] or match["n2"] or match["n3"])
        denominator = int(match["d1"] or match["d2"] or match["d3"])
        if denominator != 0:
            return _Number(Fraction(-numerator if match["sign"] == "-" else numerator, denominator))
    return None


def _numbers_equal(a: _Number, b: _Number) -> bool:
    """Compare exactly, except that a decimal with at least 6 decimals equals values that round to it."""
    return a.value == b.value or _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(decimal: _Number, other: _Number) -> bool:
    scale = 10**decimal.places
    return is_rounding(decimal.value * scale, decimal.places, other.value * scale, other.places)


_ROUNDED_WITHIN = Fraction(1, 50)


def _is_false_equation(candidate: str) -> bool:
    """Return whether an equation chain is false, as ``3 = 4``; math-verify reads only the last number.

    ``22/7 = 3.14`` is a rounding: if a side is a decimal, a difference of 2 % is allowed.
    """
    numbers = [_plain_number(side.strip()) for side in candidate.split("=")] if "=" in candidate else []
    for one, other in pairwise(numbers):
        if one is not None and other is not None:
            rounding = _ROUNDED_WITHIN * abs(one.value) if one.is_decimal or other.is_decimal else 0
            if abs(one.value - other.value) > rounding:
                return True
    return False


_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{\s*(\d+)")


def _is_outlandish(answer: str) -> bool:
    if len(answer) > MAX_ANSWER_LENGTH:
        return True
    if any(len(match[1]) > 5 for match in _BINOMIAL.finditer(answer)):  # the parser evaluates it before its digits can be counted
        return True
    return _is_nested(answer)


def _is_nested(text: str) -> bool:
    """Return whether brackets are nested deeper than in any sensible answer; the parser's time grows with a power of the depth."""
    depth = deepest = subscripts = 0
    opened: list[bool] = []
    for index, character in enumerate(text):
        if character in "([{":
            is_subscript = character == "{" and text[max(0, index - 1) : index] == "_"
            opened.append(is_subscript)
            subscripts += is_subscript
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_NESTING or subscripts > MAX_SUBSCRIPTS:
                return True
        elif character in ")]}":
            depth -= 1
            if opened:
                subscripts -= opened.pop()
    return False


@lru_cache(maxsize=4096)
def _is_readable(truth: str) -> bool:
    """Return whether answers can be compared with a ground truth, by one of the forms or as an expression."""
    from vapo_mcore.rewards.reading import read_expression

    if forms.is_compared_as_text(truth) or read_expression(truth) is not None:
        return True
    parts = families.readable_parts(truth) or forms.readable_parts(truth)
    return parts != [truth] and bool(parts) and all(_plain_number(part) is not None or _is_readable(part) for part in parts)


def _check_readable(truth: str, ground_truth: str) -> None:
    from vapo_mcore.rewards.magnitude import has_more_digits_than
    from vapo_mcore.rewards.reading import read_expression

    shown = ground_truth if len(ground_truth) <= 100 else ground_truth[:100] + "..."
    if len(truth) > 10 * MAX_ANSWER_LENGTH or _is_nested(truth) or not _is_readable(truth):
        raise UngradableError(
            f"ground truth {shown!r} cannot be read as mathematics; the verifiers 'exact' and 'multiple_choice' compare text"
        )
    if has_more_digits_than(read_expression(truth), MAX_DIGITS):
        raise UngradableError(f"ground truth {shown!r} contains a number of more than {MAX_DIGITS:,} digits, which cannot be evaluated")


def _equals_expression(candidate: str, truth: str, truth_number: _Number | None) -> bool:
    """Compare as expressions. A plain decimal, whose number of places is known, equals values that round to it."""
    from vapo_mcore.rewards.magnitude import has_more_digits_than
    from vapo_mcore.rewards.reading import expressions_equal, is_rounded, read_expression

    expression = read_expression(candidate)
    if expression is None or has_more_digits_than(expression, MAX_DIGITS):
        return False
    expected = read_expression(truth)
    if expected is None:
        return False
    if expressions_equal(expected, expression):
        return True
    for number, other in ((truth_number, expression), (_plain_number(candidate), expected)):
        if number is not None and number.is_decimal and is_rounded(number.value, number.places, other):
            return True
    return False


def warm_up() -> None:
    """Import sympy and grade one answer of each common kind, to build parsers and caches in advance."""
    pairs = [(r"\frac{2}{3}\pi", r"\frac{\pi}{3}"), ("x+1", "x-1"), (r"\{1,2\}", "[1,2)"), ("0.333333", r"\frac13")]
    for answer, truth in [*pairs, (r"\sin^2 x + \cos^2 x", "1"), ("y=x", "2y=2x")]:
        is_equal(answer, truth)
