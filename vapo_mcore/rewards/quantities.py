"""Compare answers with units, and solution sets written as two inequalities, which math-verify would grade wrongly."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_RELATIVE = Fraction(1, 10**6)
"""Relative tolerance for values with a decimal point, which may be rounded."""

_LENGTHS = {
    "nm nanometer nanometre": "1/1000000000",
    "mm millimeter millimetre": "1/1000",
    "cm centimeter centimetre": "1/100",
    "dm decimeter decimetre": "1/10",
    "m meter metre": "1",
    "km kilometer kilometre": "1000",
    "in inch": "127/5000",
    "ft foot feet": "381/1250",
    "yd yard": "1143/1250",
    "mi mile": "201168/125",
}
_OTHERS = {
    "mass": {"mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000", "lb lbs pound": "45359237/100000"},
    "time": {
        "ms millisecond": "1/1000",
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week": "604800",
    },
    "volume": {"mL ml milliliter millilitre": "1/1000000", "L l liter litre": "1/1000"},
}


def _table() -> dict[str, tuple[str, Fraction]]:
    table = {}
    for dimension, units in {"length": _LENGTHS, **_OTHERS}.items():
        for names, factor in units.items():
            for name in names.split():
                table[name] = dimension, Fraction(factor)
                if len(name) > 2:
                    table[f"{name}es" if name == "inch" else f"{name}s"] = dimension, Fraction(factor)
    return table


_UNITS = _table()


def unit_name(word: str) -> str | None:
    """Return one name for all spellings of a unit; None for other words and for single letters."""
    known = None if len(word) == 1 else _UNITS.get(word) or _UNITS.get(word.lower())
    return None if known is None else f"{known[1]} {known[0]}"


_POWERS = {("length", 1): "length", ("length", 2): "area", ("length", 3): "volume"}
_QUANTITY = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<number>\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?|\.\d{1,30})|\\[dt]?frac\{(?P<up>\d{1,30})\}\{(?P<down>\d{1,30})\})"
    r"(?:\\[,;: ]|~|\s)*(?:\\(?:text|mathrm|textrm|mbox)\s*\{\s*)?(?P<power_word>square |cubic |sq )?(?P<unit>[A-Za-z]{1,12})\.?\s*\}?"
    r"(?:\^\{?(?P<power>[23])\}?)?\s*\}?"
)


def quantities_equal(answer: str, truth: str) -> bool | None:
    """Return whether two numbers with known units are the same quantity; None if either has no or an unknown unit.

    ``5 cm`` equals 0.05 m, not 5 m. Knows lengths (with powers areas and volumes), masses and times.
    """
    one, other = _read(answer), _read(truth)
    if one is None or other is None:
        return None
    (ours, dimension, rounded), (theirs, expected, also_rounded) = one, other
    if dimension != expected:
        return False
    return abs(ours - theirs) <= (_RELATIVE * abs(theirs) if rounded or also_rounded else 0)


def number_of(answer: str) -> str | None:
    """Return the number of a quantity with a known unit, for a ground truth without a unit; None for anything else."""
    if _read(answer) is None:
        return None
    match = _QUANTITY.fullmatch(_bare(answer))
    assert match is not None
    return match["sign"] + (match["number"].replace(",", "") if match["number"] else f"{match['up']}/{match['down']}")


def _bare(text: str) -> str:
    return text.strip().strip("$").strip().removesuffix(".").replace("\u00b2", "^2").replace("\u00b3", "^3")


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Fraction, str, bool] | None:
    """Return (value in the dimension's base unit, dimension, whether it has a decimal point), or None."""
    if len(text) > 100 or not any(character.isalpha() for character in text):
        return None
    match = _QUANTITY.fullmatch(_bare(text))
    known = match and (_UNITS.get(match["unit"]) or _UNITS.get(match["unit"].lower()))
    if match is None or known is None or match["down"] == "0" * len(match["down"] or "x"):
        return None
    number = match["number"].replace(",", "") if match["number"] else f"{match['up']}/{match['down']}"
    value = Fraction(number) * (-1 if match["sign"] == "-" else 1)
    word = {"square ": 2, "sq ": 2, "cubic ": 3}.get(match["power_word"] or "", 1)
    power = max(word, int(match["power"] or 1))
    dimension = known[0] if power == 1 else _POWERS.get((known[0], power))
    return None if dimension is None else (value * known[1] ** power, dimension, "." in number)


_ORDER = r"(<|>|\\leq?(?:slant)?(?![a-z])|\\geq?(?:slant)?(?![a-z])|\u2264|\u2265)"
_TWO_INEQUALITIES = re.compile(
    rf"\s*([a-z])\s*{_ORDER}\s*([^<>=,;]{{1,40}}?)\s*(?:\\text\s*\{{\s*or\s*\}}|\bor\b|\\lor|\\vee)\s*\1\s*{_ORDER}\s*([^<>=,;]{{1,40}}?)\s*"
)


def as_union(text: str) -> str:
    """Rewrite ``x<-1 \\text{ or } x>2`` as ``(-\\infty,-1)\\cup(2,\\infty)``; return anything else unchanged."""
    match = _TWO_INEQUALITIES.fullmatch(text)
    if match is None:
        return text
    parts = {}
    for order, bound in ((match[2], match[3]), (match[4], match[5])):
        below, strict = order in ("<", "\u2264") or order.startswith("\\le"), order in "<>"
        parts[below] = rf"(-\infty,{bound}{')' if strict else ']'}" if below else rf"{'(' if strict else '['}{bound},\infty)"
    return rf"{parts[True]}\cup{parts[False]}" if len(parts) == 2 else text
