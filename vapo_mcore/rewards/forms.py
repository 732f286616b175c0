"""Compare answers by their written form before they are parsed as mathematics.

Covers numbers in a stated base, percentages, ratios, sequences with dots, lists, tuples and names of points. The
LaTeX parser drops what matters in them (the base, the order, the dots) or is slow on them. Each comparison returns None for answers of
another form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Equal = Callable[[str, str], bool]
"""Comparison of two parts, (part of the answer, part of the ground truth)."""

_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12, "sixteen": 16}
_BASE = (
    rf"(?:_\s*(?:(\d)|\{{\s*\(?(?:\\(?:text|mathrm)\s*\{{)?\s*(\d{{1,2}}|{'|'.join(_WORDS)})\s*\}}?\)?\s*\}}"
    rf"|\\(?:text|mathrm)\s*\{{\s*(\d{{1,2}}|{'|'.join(_WORDS)})\s*\}})"
    rf"|\s*\(?\s*(?:\\(?:text|mathrm)\s*\{{)?\s*(?:in )?base[ -](\d{{1,2}}|{'|'.join(_WORDS)})\s*\}}?\s*\)?)"
)
# A single letter is a term of a sequence, such as Fibonacci's F_{17}, not a digit.
_BASED = re.compile(
    rf"(-?)\(?(?:(?:\\(?:text|mathrm))?\{{?\s*(?P<digits>[0-9]|[0-9A-Fa-f]{{2,100}})\}}?|\\(?:text|mathrm)\{{\s*(?P<letter>[A-Fa-f])\s*\}})\)?{_BASE}"
)
_BARE_DIGITS = re.compile(r"(-?)([0-9]+)")


def based_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare numbers in stated bases by value if the base has their digits, else by digits and base.

    If only one side states a base, the same digits are equal.
    """
    ours, theirs = _based(candidate), _based(truth)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        values = _in_base(*ours), _in_base(*theirs)
        return ours == theirs if None in values else values[0] == values[1]
    if "base" in candidate or "base" in truth:
        return False  # an unparsed base, which changes the value of the digits
    if theirs is not None:
        bare = _BARE_DIGITS.fullmatch(candidate)
        return None if bare is None else bare[0] == theirs[0]
    assert ours is not None
    if ours[0] == truth:
        return True
    value = _in_base(*ours)
    return False if value is None else equal(str(value), truth)


def _based(text: str) -> tuple[str, int] | None:
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    base = next(group for group in match.groups()[3:] if group)
    return match[1] + (match["digits"] or match["letter"]).upper(), _WORDS.get(base) or int(base)


def _in_base(digits: str, base: int) -> int | None:
    try:
        return int(digits, base) if base > 1 else None
    except ValueError:
        return None


_PERCENTAGE = re.compile(r"(.{1,100}?)\s*\\?%")


def percentages_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare percentages; a percentage equals a plain number if that is its number or a hundredth of it: 12.5 % is 12.5 or 0.125."""
    ours, theirs = _PERCENTAGE.fullmatch(candidate), _PERCENTAGE.fullmatch(truth)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return equal(ours[1], theirs[1])
    if r"\circ" in candidate or r"\circ" in truth:
        return False
    if ours is not None:
        return equal(ours[1], truth) or equal(_over(ours[1], "100"), truth)
    assert theirs is not None
    return equal(candidate, theirs[1]) or equal(candidate, _over(theirs[1], "100"))


def _over(part: str, whole: str) -> str:
    try:
        value = Fraction(part) / Fraction(whole)
    except (ValueError, ZeroDivisionError):
        return rf"\frac{{{part}}}{{{whole}}}"
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_TO = re.compile(r"([\d.]{1,20})\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*([\d.]{1,20})")
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?:\s|\\ |~|\\text\s*\{)*([ap])?\.?\s*m?\.?\s*\}?", re.IGNORECASE)


def ratios_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare ``2:3:5`` by proportion; a ground truth such as ``10:45`` is a time of day."""
    ours, theirs = _ratio(candidate), _ratio(truth)
    if ours is None and theirs is None:
        return None
    if (clock := _CLOCK.fullmatch(truth)) and ours is not None:
        other = _CLOCK.fullmatch(candidate)
        halves = {match[3].casefold() for match in (clock, other) if match and match[3]}
        return other is not None and (int(other[1]), other[2]) == (int(clock[1]), clock[2]) and len(halves) < 2
    if ours is None or theirs is None:
        whole = ours or theirs
        assert whole is not None
        if len(whole) != 2:
            return False
        return equal(_over(*whole), truth) if theirs is None else equal(candidate, _over(*whole))
    if len(ours) != len(theirs):
        return False
    return all(equal(_over(one, ours[0]), _over(other, theirs[0])) for one, other in zip(ours[1:], theirs[1:], strict=True)) or all(
        equal(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def _ratio(text: str) -> list[str] | None:
    if match := _TO.fullmatch(text):
        return [match[1], match[2]]
    clock = _CLOCK.fullmatch(text)
    if clock and clock[3]:
        return [clock[1], clock[2]]
    parts = re.split(r":|\\colon(?![a-z])", text)
    plain = 2 <= len(parts) <= 8 and not any(symbol in text for symbol in ("=", r"\{", "|"))
    return [part.strip() for part in parts] if plain and all(part.strip() for part in parts) else None


_DOTS = re.compile(r"\\(?:ldots|cdots|dots[cbmio]?|vdots)(?![a-z])|\u2026|\.\.\.")


def dotted_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare sequences and sums with dots part by part, with the dots at the same position."""
    if not (is_dotted(candidate) or is_dotted(truth)):
        return None
    if not is_dotted(truth):
        return False
    ours, theirs = (_comma_parts(_DOTS.sub(" ... ", text).replace(r"\{", "").replace(r"\}", "")) for text in (candidate, truth))
    if len(ours) != len(theirs):
        return False
    return all(_dotted_part(one, other, equal) for one, other in zip(ours, theirs, strict=True))


def is_dotted(text: str) -> bool:
    """Return whether the text abbreviates a sequence with dots (``0.333...`` does not count)."""
    return bool(_DOTS.search(text)) and not _DOTS.fullmatch(text.strip())


def _dotted_part(one: str, other: str, equal: Equal) -> bool:
    if "..." in one or "..." in other or not one.strip() or not other.strip():
        return "".join(one.split()) == "".join(other.split())
    return equal(one.strip(), other.strip())


_CONGRUENCE = re.compile(
    r"(?:(?P<name>[A-Za-z])\s*(?:\\equiv(?![a-z])|\u2261|=)\s*)?(?P<rest>.{1,60}?)\s*"
    r"(?:\\pmod\s*\{?\s*(?P<braced>\w{1,30})\s*\}?|\\?\(\s*\\?b?mod\s*\{?\s*(?P<round>\w{1,30})\}?\s*\)"
    r"|\\b?mod(?![a-z])\s*\{?\s*(?P<plain>\d{1,30})\}?)"
)


def congruences_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare ``x \\equiv 12 \\pmod{17}`` by residue and modulus if both state one, else by residue."""
    ours, theirs = _congruence(candidate), _congruence(truth)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return ours[1] == theirs[1] and (equal(ours[0], theirs[0]) or _same_class(ours[0], theirs[0], ours[1]))
    return equal(candidate if ours is None else ours[0], truth if theirs is None else theirs[0])


def _congruence(text: str) -> tuple[str, str] | None:
    match = _CONGRUENCE.fullmatch(text) if "mod" in text else None
    return None if match is None else (match["rest"], match["braced"] or match["round"] or match["plain"])


def _same_class(one: str, other: str, modulus: str) -> bool:
    numbers = [int(text) for text in (one, other, modulus) if re.fullmatch(r"-?\d{1,30}", text)]
    return len(numbers) == 3 and numbers[2] > 0 and (numbers[0] - numbers[1]) % numbers[2] == 0


_ASSIGNED = re.compile(
    r"([A-Za-z])\s*(?:=|\\in(?![a-z])|(?<=[A-Z])(?=\s*(?:\\left\s*)?\())\s*((?:\\left\s*)?(?:[(\[]|\\\{).*[,].*(?:[)\]]|\\\}))"
)


def assigned_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare ``D = (0, 1)`` by name, if both give one, and by interval, point or set; math-verify cannot subtract a set from a symbol."""
    ours, theirs = _ASSIGNED.fullmatch(candidate), _ASSIGNED.fullmatch(truth)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None and ours[1] != theirs[1]:
        return False
    return equal(candidate if ours is None else ours[2], truth if theirs is None else theirs[2])


_NAMED = re.compile(
    r"\\(?P<kind>overline|bar|overrightarrow|overleftarrow|overleftrightarrow|vec|underline|widehat|angle|triangle)"
    r"(?![a-z])\s*(?:\{\s*(?P<braced>[A-Za-z\d ]{1,8})\s*\}|(?P<bare>[A-Za-z]{1,4}))"
)
_LETTERS = re.compile(r"[A-Za-z\d]{2,8}")
_LIKE = {"bar": "overline", "vec": "overrightarrow"}


def names_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare segments, rays, vectors, numbers of digits, angles and triangles by their letters in order; as products, AB would equal BA.

    An angle may be reversed; a triangle may start at any vertex and may be reversed.
    """
    ours, theirs = _named(candidate), _named(truth)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        kind, letters = ours or theirs  # type: ignore[misc]
        other = candidate if ours is None else truth
        if not _LETTERS.fullmatch(other):
            return None
        return other in _readings(kind, letters)
    return ours[0] == theirs[0] and ours[1] in _readings(*theirs)


def _named(text: str) -> tuple[str, str] | None:
    match = _NAMED.fullmatch(text)
    if match is None:
        return None
    letters = (match["braced"] or match["bare"]).replace(" ", "")
    if not any(letter.isalpha() for letter in letters):
        return None
    return _LIKE.get(match["kind"], match["kind"]), letters


def is_compared_as_text(truth: str) -> bool:
    """Return whether a ground truth is a name or a sequence with dots, which are compared as text."""
    return _named(truth) is not None or (is_dotted(truth) and any(character.isalnum() for character in _DOTS.sub("", truth)))


def _readings(kind: str, letters: str) -> set[str]:
    if kind == "angle":
        return {letters, letters[::-1]}
    if kind == "triangle":
        turned = {letters[n:] + letters[:n] for n in range(len(letters))}
        return turned | {one[::-1] for one in turned}
    return {letters}


def readable_parts(truth: str) -> list[str]:
    """Return the parts of a ground truth that must be readable as mathematics; the whole text if it has none of these forms."""
    if based := _based(truth):
        return [str(value)] if (value := _in_base(*based)) is not None else ["0"]
    if percentage := _PERCENTAGE.fullmatch(truth):
        return [percentage[1]]
    if congruence := _congruence(truth):
        return [congruence[0]]
    if assigned := _ASSIGNED.fullmatch(truth):
        return [assigned[2]]
    return _ratio(truth) or values_of(truth) or [truth]


_BRACKETED = re.compile(r"(?:\\left\s*)?([(\[])([^()\[\]{}=|;]*,[^()\[\]{}=|;]*?)(?:\\right\s*)?([)\]])")


def tuples_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare intervals and tuples in the same kind of brackets part by part.

    math-verify takes twenty times as long for ``(1,2]`` as for its two ends.
    """
    ours, theirs = _BRACKETED.fullmatch(candidate), _BRACKETED.fullmatch(truth)
    if ours is None or theirs is None or (ours[1], ours[3]) != (theirs[1], theirs[3]):
        return None
    parts, truth_parts = ours[2].split(","), theirs[2].split(",")
    if len(parts) != len(truth_parts) or not all(part.strip() for part in truth_parts):
        return None
    return all(equal(part, truth_part) for part, truth_part in zip(parts, truth_parts, strict=True))


_POINT = re.compile(r"(?:(?:\\left\s*)?\([A-Za-z](?:\s*,\s*[A-Za-z])+\s*(?:\\right\s*)?\)\s*=\s*)?(?:\\left\s*)?\((.*?)(?:\\right\s*)?\)")


def points_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare ``(4, 7)`` with ``(x, y) = (4, 7)``, ``x = 4, y = 7`` or ``4, 7``, in order."""
    ours, theirs = _coordinates(candidate), _coordinates(truth)
    if (ours is None) == (theirs is None) and _POINT_NAMED.match(candidate) is None and _POINT_NAMED.match(truth) is None:
        return None
    ours = ours or values_of(candidate)
    theirs = theirs or values_of(truth)
    if ours is None or theirs is None or len(ours) < 2 or len(theirs) < 2:
        return None
    return len(ours) == len(theirs) and all(equal(one, other) for one, other in zip(ours, theirs, strict=True))


_POINT_NAMED = re.compile(r"(?:\\left\s*)?\([A-Za-z](?:\s*,\s*[A-Za-z])+\s*(?:\\right\s*)?\)\s*=")


def _coordinates(text: str) -> list[str] | None:
    match = _POINT.fullmatch(text)
    if match is None:
        return None
    parts = _comma_parts(match[1])
    closes = all(part.count("(") == part.count(")") and part.find("(") <= part.find(")") for part in parts)  # not ``(1, 2), (3, 4)``
    return [part.strip() for part in parts] if len(parts) > 1 and closes else None


MAX_LIST = 30
_JOINED = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")


def lists_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare lists and sets of values as multisets, in any order; ``\\pm 3`` are two values."""
    ours, theirs = values_of(candidate), values_of(truth)
    if ours is None or theirs is None or not 2 <= max(len(ours), len(theirs)) <= MAX_LIST:
        return None
    names = [_names(candidate, ours), _names(truth, theirs)]
    if len(ours) != len(theirs) or (all(names) and set(names[0]) != set(names[1])):
        return False
    if (len(set(names[1])) > 1 and not names[0]) or (len(set(names[0])) > 1 and not names[1]):  # ``3, 4`` for ``x = 3, y = 4``
        return all(equal(one, other) for one, other in zip(ours, theirs, strict=True))
    return matched(ours, theirs, equal)


def matched(ours: list[str], theirs: list[str], equal: Equal) -> bool:
    """Return whether each value equals one of the other list, each used once."""
    left = list(ours)
    for value in theirs:
        found = next((index for index, one in enumerate(left) if equal(one, value)), None)
        if found is None:
            return False
        del left[found]
    return not left


_NO_LIST = re.compile(r"\\(?:begin|le|ge|lt|gt|cup|cap|mid|leq|geq)(?![a-z])|[<>;|]")
_NAME = re.compile(r"\s*([A-Za-z])\s*=")


def _names(text: str, values: list[str]) -> list[str]:
    """Return the unknowns to which a list assigns its values."""
    found = [match[1] for value in values if (match := _NAME.match(value))]
    return found or ([match[1]] if (match := _NAME.match(text)) else [])


def values_of(text: str) -> list[str] | None:
    """Return the values of a list or set; None if it has brackets other than a set's, or is ordered."""
    match = re.fullmatch(r"(?:[A-Za-z]\s*(?:=|\\in)\s*)?(?:(?:\\left\s*)?\\\{(.*?)(?:\\right\s*)?\\\}|\{([^{}]*)\})", text)
    inner = (match[1] or match[2] or "") if match else text
    if not inner.strip() or _NO_LIST.search(inner):
        return None
    parts = [part.strip() for joined in _comma_parts(inner) for part in _JOINED.split(joined)]
    if not all(parts):
        return None
    name = _NAME.match(parts[0]) if len(parts) > 1 else None
    if name and not any("=" in part for part in parts[1:]):
        parts[0] = parts[0][name.end() :].strip()  # ``n = 2, 3``
    values: list[str] = []
    for part in parts:
        signs = len(_PLUS_MINUS.findall(part))
        if signs > 1 or r"\mp" in part:
            return None
        values += [_PLUS_MINUS.sub(lambda _, sign=sign: sign, part) for sign in ("+", "-")] if signs else [part]
    return values


def _comma_parts(text: str) -> list[str]:
    """Split at the commas outside all brackets, in linear time."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
