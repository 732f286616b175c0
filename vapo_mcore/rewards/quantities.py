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
        "h hr hrs hour": "3600",
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


def is_unit(word: str) -> bool:
    """Return whether a word, or a single letter, is the name of a known unit."""
    return word in _UNITS or word.lower() in _UNITS


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


_MEASURED = re.compile(
    r"(?P<value>.{1,200}?)(?:\\[,;: ]|~|\s)*\\(?:text|mathrm|textrm|mbox)\s*\{\s*~?(?P<power_word>square |cubic |sq )?"
    r"(?P<unit>[A-Za-z]{1,12})\.?\s*\}(?:\^\{?(?P<power>[23])\}?)?"
)


def measured(text: str) -> tuple[str, Fraction, str] | None:
    """Return (expression, factor to the base unit, dimension) of ``12\\sqrt{3}\\text{ cm}``; None without a known unit."""
    match = _MEASURED.fullmatch(_bare(text))
    known = match and (_UNITS.get(match["unit"]) or _UNITS.get(match["unit"].lower()))
    if match is None or known is None:
        return None
    power = max({"square ": 2, "sq ": 2, "cubic ": 3}.get(match["power_word"] or "", 1), int(match["power"] or 1))
    dimension = known[0] if power == 1 else _POWERS.get((known[0], power))
    return None if dimension is None else (match["value"], known[1] ** power, dimension)


_ORDER = r"(<|>|\\leq?(?:slant)?(?![a-z])|\\geq?(?:slant)?(?![a-z])|\u2264|\u2265)"
_OR = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\lor(?![a-z])|\\vee(?![a-z]))\s*")
_BOUND = r"([^<>=,;]{1,40}?)"
_POINT = re.compile(rf"\s*([a-z])\s*=\s*{_BOUND}\s*")
_ONE_BOUND = re.compile(rf"\s*([a-z])\s*{_ORDER}\s*{_BOUND}\s*")
_TWO_BOUNDS = re.compile(rf"\s*{_BOUND}\s*{_ORDER}\s*([a-z])\s*{_ORDER}\s*{_BOUND}\s*")


def as_union(text: str) -> str:
    """Rewrite ``x<-1 \\text{ or } 0<x<2`` as ``(-\\infty,-1)\\cup(0,2)``; return anything else unchanged."""
    parts = _OR.split(text)
    if len(parts) < 2:
        return text
    found = [_as_interval(part) for part in parts]
    names = {name for name, _ in found}
    if len(names) > 1 or "" in names or all(interval.startswith("\\{") for _, interval in found):
        return text
    return r"\cup".join(interval for _, interval in found)


def _as_interval(text: str) -> tuple[str, str]:
    """Return (variable, interval) of an inequality, (variable, set) of an equation; two empty texts for anything else."""
    if (point := _POINT.fullmatch(text)) is not None:
        return point[1], rf"\{{{point[2]}\}}"
    if (one := _ONE_BOUND.fullmatch(text)) is not None:
        below, strict = _order(one[2])
        return one[1], (rf"(-\infty,{one[3]}{')' if strict else ']'}" if below else rf"{'(' if strict else '['}{one[3]},\infty)")
    two = _TWO_BOUNDS.fullmatch(text)
    if two is None:
        return "", ""
    (below, strict), (also_below, also_strict) = _order(two[2]), _order(two[4])
    if below != also_below:
        return "", ""
    if below:
        return two[3], f"{'(' if strict else '['}{two[1]},{two[5]}{')' if also_strict else ']'}"
    return two[3], f"{'(' if also_strict else '['}{two[5]},{two[1]}{')' if strict else ']'}"


def _order(sign: str) -> tuple[bool, bool]:
    """Return whether the sign means below, and strictly."""
    return sign in ("<", "\u2264") or sign.startswith("\\le"), sign in "<>"
