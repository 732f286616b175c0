"""Normalise the notations that people and models use for answers into the LaTeX that math-verify reads.

Changes the notation only, never the value, and leaves alone what math-verify already understands.
"""

from __future__ import annotations

import re

from vapo_mcore.rewards.quantities import is_unit, unit_name

_WRAPPERS = (
    re.compile(r"\$\$(.*)\$\$", re.DOTALL),
    re.compile(r"\$([^$]*)\$", re.DOTALL),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    re.compile(r"\*\*(.*)\*\*", re.DOTALL),
    re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL),
)

_SYMBOLS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/",
        "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
        "\u00b1": r"\pm ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2205": r"\emptyset ", "\u2208": r"\in ",
        "\u211d": r"\mathbb{R}", "\u00b0": r"^\circ ", "\u2070": "^0", "\u00b9": "^1", "\u00b2": "^2", "\u00b3": "^3",
        "\u2074": "^4", "\u2075": "^5", "\u2076": "^6", "\u2077": "^7", "\u2078": "^8", "\u2079": "^9",
        "\u00bd": r"\frac{1}{2}", "\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}", "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u20ac": "", "\u00a3": "", "\u00a5": "", "\u00a2": "",
    }
)  # fmt: skip

_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|emph|mathrm|mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mbox)\s*\{([^{}]*)\}"
)
_SPACE = r"(?:\s|~|\\(?:[ ,;:>]|q?quad(?![a-z])|(?:en|thin)space(?![a-z])))"
_OUTER_SPACE = re.compile(rf"^{_SPACE}+|(?<!\\){_SPACE}+$")
_SPACE_AFTER_COMMA = re.compile(rf",{_SPACE}+")
_ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-z]))")
_GROUPED_DIGITS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;! ]|\{,\}|~| )\d{3})+(?![\d/])")
_SEPARATOR = re.compile(r"\\[,;! ]|\{,\}|~| ")
_TIMES_A_POWER = re.compile(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)")
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([-+]?\d{1,4})")
_REPEATING = re.compile(r"(?<![\d.])(\d{0,15})\.(\d{0,30})\\overline\s*(?:\{(\d{1,30})\}|(\d))")
_GOING_ON = re.compile(r"([-+]?)(\d{0,15}\.\d{1,30})(?:\.\.\.|\u2026|\\[ld]?dots)")
_SHOWN_PERIOD = re.compile(r"(\d*)\.(\d*?)(\d{1,6}?)\3+")
_SEGMENT = re.compile(r"\\overline\s*\{\s*([A-Z]{2})\s*\}")
_CURRENCY = re.compile(r"\\?\$\s*(?=[-+.\d])")
_GROUPED_BY_COMMAS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_COMMON_LOG = re.compile(r"\\lg(?![a-z])\s*")
_FRACTION_NAME = re.compile(r"\\(?:nice|s|x)frac(?![a-z])")
_EMPTY_SET = re.compile(rf"\\\{{{_SPACE}*\\\}}")
_BLACKBOARD = re.compile(r"\\mathbb\s+([A-Z])")
_POWER_E = re.compile(r"\^\s*e(?![A-Za-z])")
_SIZE = re.compile(r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|displaystyle|textstyle)(?![A-Za-z])\s*")
_SPELLED_TOO = re.compile(rf"(\d{{1,2}}){_SPACE}*(?:\\text\s*\{{\s*)?\(([A-Za-z -]{{3,20}})\)\s*\}}?")
_BUILT_SET = re.compile(
    r"\\\{\s*([a-z])(?:\s*\\in\s*\\mathbb\{R\})?\s*(?::|\||\\mid(?![a-z])|\\colon(?![a-z])|\\vert(?![a-z]))\s*([^:|{}]{1,80}[<>]|[^:|{}]{0,80}\\[lg]e(?:q|qslant)?(?![a-z]))([^:|{},]{0,80})\\\}"
)
_VALUE_OF = re.compile(r"[A-Za-z]\s*\(\s*-?\d{1,20}\s*\)\s*=\s*([^=]+)")
_NATURAL_LOG = re.compile(r"\\log\s*_\s*(?:e|\{\s*e\s*\})\s*")
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLE = re.compile(
    rf"([-+]?\d[\d,]{{0,20}}(?:\.\d{{1,20}})?)(?:\s|\\ |~)*(?:\\text\s*\{{\s*)?({'|'.join(_POWERS_OF_TEN)})(?:\s+[a-z]{{4,20}})?\s*\}}?",
    re.IGNORECASE,
)
_NUMBER_AND_TEXT = re.compile(r"([-+]?[\d.,]{1,40})(?:\s|\\ |~)*\\(?:text|mathrm|textrm|mbox)\s*\{\s*([^{}()]{1,80}?)\s*\}")
_ROMAN_CONSTANT = re.compile(r"\\(?:mathrm|text|rm|operatorname)\s*\{\s*(e|i)\s*\}")
_APPROXIMATELY = re.compile(r"^\s*(?:\\approx|\\simeq|\u2248)\s*")
_CELSIUS = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})")
_NEGATIVE_POWER = re.compile(r"\^\s*-\s*(\d+)")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_ABOUT = re.compile(r"(?:(?:approximately|approx\.?|about|around|roughly|exactly)\s+|~\s*)(?=[-+$\\\d.])", re.IGNORECASE)
_VALUE_FIRST = re.compile(r"([-+]?[^A-Za-z=<>]{1,60}?)\s*=\s*([A-Za-z])")
_COUNTED = re.compile(r"((?:[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)|\d+/\d+))\s+([A-Za-z]{4,20}(?:[ -][A-Za-z]{2,20}){0,4})")
_NUMBER_WORDS = re.compile(
    r"\b(?:tens?|hundred|thousand|[a-z]*illion|lakh|crore|dozen|gross|score|pair|hal[fv]e?|third|fourth|quarter|fi?fth|sixth|seventh|eighth|"
    r"ninth|tenth|eleventh|twel[vf]th|[a-z]+teenth|[a-z]+tieth|hundredth|thousandth|[a-z]*illionth|zero|one|two|three|four|five|six|seven|"
    r"eight|nine|[a-z]+teen|twenty|thirty|root|sqrt|radical|squared|cubed|power|raised|factorial|times|over|divided|multiplied|added|"
    r"subtracted|doubled|tripled|halved|twice|than|below|above|plus|minus|negative|choose|permute|mod|modulo|percent|"
    r"permille|basis|base|binary|octal|decimal|hexadecimal|recurring|repeating|pi|inf|infinity|alpha|beta|gamma|delta|epsilon|theta|"
    r"lambda|sigma|omega|sin|cos|tan|log|exp|and|or|not|wrong|incorrect)s?\b",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"(?<=\d)\s*(?:percent|per cent)", re.IGNORECASE)
_SPACED_IMAGINARY = re.compile(r"(?<=\d)\s+i\b")
_DEGREES = r"(\d+(?:\.\d+)?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})"
_TRIGONOMETRIC = re.compile(
    rf"(\\(?:sin|cos|tan|cot|sec|csc))\s*(?:\(\s*{_DEGREES}\s*\)|\\left\(\s*{_DEGREES}\s*\\right\)|\{{\s*{_DEGREES}\s*\}}|{_DEGREES})"
)
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_OUTWARD_BRACKETS = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")

_LENGTH = "nm|mm|cm|dm|m|km|in|ft|yd|mi"
_UNIT = rf"(?:{_LENGTH}|mg|g|kg|lb|mol|mL|L|J|kJ|N|W|rad|rev)"
_PER = rf"(?:s|ms|min|h|hr|{_LENGTH}|g|kg|mL|L|mol|K)"
_RATE = re.compile(rf"([-+]?[\d.,]+)\s*{_UNIT}(?:\^\{{?\d\}}?)?\s*/\s*{_PER}(?:\^\{{?\d\}}?)?")


def normalize_answer(text: str) -> str:
    """Remove delimiters, replace Unicode by ASCII and LaTeX, and write numbers in one notation."""
    text = _unwrapped(text)
    if (wrapped := _TEXT_COMMAND.fullmatch(text)) and any(character.isdigit() for character in wrapped[1]):
        text = wrapped[1].strip()  # words in \\text are compared as words, see as_words
    text = _PLAIN_ROOT.sub(lambda match: rf"\sqrt{{{match[1]}}}", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
    text = _SIZE.sub("", text.translate(_SYMBOLS)).strip()
    text = (
        _EMPTY_SET.sub(lambda _: r"\emptyset", text).replace(r"\varnothing", r"\emptyset").replace(r"\langle", "(").replace(r"\rangle", ")")
    )
    text = text if _SEGMENT.fullmatch(text) else _SEGMENT.sub(r"\1", text)
    text = _CURRENCY.sub("", text.replace(r"\!", ""))
    text = _SPACE_AFTER_COMMA.sub(", ", text)
    text = text.replace(",", "") if _GROUPED_BY_COMMAS.fullmatch(text) else text
    text = _ROMAN_CONSTANT.sub(r"\1", text)
    text = _without_doubled_braces(text)
    text = _APPROXIMATELY.sub("", text)
    text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
    text = _GROUPED_DIGITS.sub(lambda match: _SEPARATOR.sub("", match[0]), text)
    text = _TIMES_A_POWER.sub(lambda _: r"\times ", text)
    text = _NEGATIVE_POWER.sub(r"^{-\1}", text)
    text = _CELSIUS.sub(lambda _: r"^\circ", text)
    text = _TRIGONOMETRIC.sub(_in_radians, text)  # elsewhere the degree sign is dropped, as a unit
    text = _SPACED_IMAGINARY.sub("i", text)  # math-verify reads the i of "7 i" and of "7i" as different symbols
    text = _PI.sub(lambda _: r"\pi ", text)
    text = _REPEATING.sub(lambda match: _as_fraction("", match[1], match[2], match[3] or match[4]), text)
    text = _COMMON_LOG.sub(lambda _: r"\log_{10} ", _NATURAL_LOG.sub(lambda _: r"\ln ", text))
    text = _FRACTION_NAME.sub(lambda _: r"\frac", _BLACKBOARD.sub(r"\\mathbb{\1}", _POWER_E.sub("^{e}", text)))
    return _as_whole(text)


def _as_whole(text: str) -> str:
    """Rewrite an answer that has one of these forms as a whole."""
    if (number := _counted_word(text)) is not None:
        return str(number)
    if (twice := _SPELLED_TOO.fullmatch(text)) and str(_counted_word(twice[2])) == twice[1]:
        return twice[1]
    if (built := _BUILT_SET.fullmatch(text)) and built[1] in built[2] + built[3]:
        return (built[2] + built[3]).strip()
    if value := _VALUE_OF.fullmatch(text):
        text = value[1]
    if _TEXT_COMMAND.sub(r"\1", text).strip().lower() in ("infinity", "inf", "+infinity"):
        return r"\infty"
    if multiple := _MULTIPLE.fullmatch(text):
        return rf"{multiple[1].replace(',', '')}\times 10^{{{_POWERS_OF_TEN[multiple[2].lower()]}}}"
    if (worded := _NUMBER_AND_TEXT.fullmatch(text)) and _NUMBER_WORDS.search(worded[2]):
        text = f"{worded[1]} {worded[2]}"  # the parser drops the contents of \\text
    if scientific := _SCIENTIFIC.fullmatch(text):
        return rf"{scientific[1]}\times 10^{{{int(scientific[2])}}}"
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}{mixed[2]}\frac{{{mixed[3]}}}{{{mixed[4]}}}"
    if going_on := _GOING_ON.fullmatch(text):
        shown = _SHOWN_PERIOD.fullmatch(going_on[2])
        return _as_fraction(going_on[1], *shown.groups()) if shown and len(going_on[2]) > 4 else going_on[1] + going_on[2]
    if rate := _RATE.fullmatch(text):
        return rate[1]
    if turned := _VALUE_FIRST.fullmatch(text):
        return f"{turned[2]}={turned[1]}"
    if text[-1:].isalpha():
        return _without_noun(text)
    return _usual_brackets(text)


# fmt: off
_BELOW_TWENTY = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
# fmt: on
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_COUNTS = {word: number for number, word in enumerate(_BELOW_TWENTY)} | {word: 10 * number for number, word in enumerate(_TENS, 2)}


def _counted_word(text: str) -> int | None:
    """Return the number that a text spells out, below 100 (``seven``, ``Twenty-one``); None for other texts."""
    if len(text) > 40 or (not text[-1:].isalpha() and text[-1:] != "}"):
        return None
    words = _TEXT_COMMAND.sub(r"\1", text).strip().casefold().replace("-", " ").split()
    if len(words) == 2 and words[0] in _TENS and 1 <= _COUNTS.get(words[1], 0) <= 9:
        return _COUNTS[words[0]] + _COUNTS[words[1]]
    return _COUNTS.get(words[0]) if len(words) == 1 else None


def _without_noun(text: str) -> str:
    """Rewrite ``12 dollars`` to ``12``, ``5 percent`` to ``5\\%``; keep ``12 million`` and ``2 thirds``, whose words change the value."""
    text = _PERCENT.sub(lambda _: r"\%", text)
    counted = _COUNTED.fullmatch(text)
    return text if counted is None or _NUMBER_WORDS.search(counted[2]) else counted[1]


_TEXT_UNIT = re.compile(
    r"(?<=\S)(?:\\[,;: ]|~|\s)*\\(?:text|mathrm|textrm|mbox)\s*\{\s*[A-Za-z][A-Za-z ./^\d-]{0,60}\}(?:\^(?:\d|\{\d\}))?\s*$"
)
_NUMBER_AND_WORDS = re.compile(
    r"(?P<number>(?:\\[A-Za-z]+|\\[^A-Za-z]|[^A-Za-z\\]){1,200}?)(?P<space>\s*)"
    r"(?P<words>[A-Za-z]+(?:[ .-]+[A-Za-z]+){0,5})\.?\s*(?:\^\{?[23]\}?)?\s*"
)
_SHORT_NOUNS = re.compile("men|way|toy|rev|deg|mph|kph|rpm|mol|ohm|yrs|usd|cal|gal|bit|per|sq|cu|in|ft|of|and|th")


def without_unit(text: str) -> str:
    """Remove what counts or measures after a number, and not factors: ``5 cm`` is 5, but ``r^2h``, ``3ab`` and ``2t`` are products."""
    text = _TEXT_UNIT.sub("", text) or text
    match = _NUMBER_AND_WORDS.fullmatch(text)
    if match is None or not re.search(r"\d|\\pi", match["number"]):
        return text
    words, spaced = re.split(r"[ .-]+", match["words"]), bool(match["space"])
    if len(words[0]) == 1 and not (match["number"][-1].isdigit() or (spaced and match["number"][-1] == "}")):
        return text
    if _NUMBER_WORDS.search(match["words"]):
        return text
    known = all(
        is_unit(word) or bool(_SHORT_NOUNS.fullmatch(word)) or (len(word) > 3 and (spaced or number > 0))
        for number, word in enumerate(words)
    )
    return match["number"].strip() if known else text


_MEASURES = re.compile(
    r"\b(?:percent|cents?|dollars?|euros?|pounds?|pence|penny|pennies|yen|rupees?|degrees?|radians?|celsius|fahrenheit|kelvin|"
    r"(?:milli|micro|nano)?seconds?|minutes?|hours?|days?|nights?|weeks?|months?|quarters?|years?|decades?|century|centuries|"
    r"(?:milli|centi|deci|kilo|nano)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|inch(?:es)?|feet|foot|yards?|miles?|acres?|hectares?|"
    r"ounces?|tons?|tonnes?|cups?|pints?|quarts?|gallons?|barrels?|knots|volts?|amperes?|watts?|joules?|newtons?|hertz|pascals?|"
    r"mph|kph|square|cubic|points?|bits?|bytes?|nickels?|dimes?|pesos?|francs?)\b",
    re.IGNORECASE,
)


def units_differ(answer: str, truth: str) -> bool:
    """Return whether both state a unit and the units differ: ``5 cents`` and ``5 dollars``.

    Nouns for counted things are ignored: ``6 ways`` equals ``6 arrangements``.
    """
    ours = _measures(answer)
    theirs = _measures(truth) if ours else ours
    return bool(theirs) and ours != theirs


def _measures(text: str) -> frozenset[str]:
    """Return the stems of the stated units, or the letter of the temperature scale; empty if none is stated."""
    if not any(character.isalpha() for character in text):
        return frozenset()
    text = _unwrapped(text).translate(_SYMBOLS).strip()
    if scale := _CELSIUS.search(text):
        return frozenset(scale[0].rstrip(" }")[-1])
    match = _WITH_WORDS.fullmatch(text)
    if match is None:
        return frozenset()
    words = [part for word in re.findall(r"[A-Za-z]+", match[1]) for part in _SPEEDS.get(word.casefold(), (word,))]
    return frozenset(stem for word in words if (stem := _measure(word)) is not None)


_SPEEDS = {"mph": ("mile", "hour"), "kph": ("kilometer", "hour"), "kmh": ("kilometer", "hour")}
_WITH_WORDS = re.compile(
    r"(?:[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+|\d+/\d+|\\[dt]?frac\{\d+\}\{\d+\})(?:\s|\\[ ,;:]|~)*"
    r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{)?|.{1,200}?\\(?:text|mathrm|textrm|mbox)\s*\{)\s*~?([A-Za-z][A-Za-z \-]{0,60}?)\.?\s*\}?"
)


def _measure(word: str) -> str | None:
    """Return a canonical name for a unit, None for other words."""
    if (unit := unit_name(word)) is not None:
        return unit
    return word.casefold().rstrip("eisy") if _MEASURES.fullmatch(word) else None


def _without_doubled_braces(text: str) -> str:
    """Rewrite ``{{{1}}}`` to ``{1}`` in linear time: doubled braces have no meaning and are slow to parse."""
    if "{{" not in text:
        return text
    partner: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            partner[opened.pop()] = match.start()
    doubled = {index for start, end in partner.items() if partner.get(start + 1) == end - 1 for index in (start, end)}
    return "".join(character for index, character in enumerate(text) if index not in doubled)


def _in_radians(match: re.Match[str]) -> str:
    degrees = next(group for group in match.groups()[1:] if group is not None)
    return rf"{match[1]}(\frac{{{degrees}\pi}}{{180}})"


def _as_fraction(sign: str, whole: str, fixed: str, repeated: str) -> str:
    """Convert a repeating decimal: ``0.1\\overline{6}`` is (16 - 1) / 90."""
    denominator = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"{sign}\frac{{{int(whole + fixed + repeated) - int(whole + fixed or 0)}}}{{{denominator}}}"


def _unwrapped(text: str) -> str:
    before = None
    while before != text:
        before = text
        text = _OUTER_SPACE.sub("", text)
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(text):
                if _is_one_group(match[1]):
                    text = match[1]
                break
    return text


def _is_one_group(content: str) -> bool:
    """Return whether the braces of ``content`` are balanced, so that the wrapper around it is a single one."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", content):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _usual_brackets(text: str) -> str:
    """Rewrite intervals with outward brackets: ``]0,1[`` to ``(0,1)``, ``[0,1[`` to ``[0,1)``."""
    match = _OUTWARD_BRACKETS.fullmatch(text)
    if match is None or (match[1], match[3]) == ("[", "]"):
        return text
    return ("(" if match[1] == "]" else "[") + match[2] + (")" if match[3] == "[" else "]")


_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "all", "one", "two", "six", "ten", "sat", "sun", "mon", "red"})


def as_words(text: str) -> str | None:
    """Return the words of an answer, case-folded, or None if it is mathematics.

    ``\\text{...}`` without digits counts as words, and so do bare letters if one word has at least four (``abc`` is a product, ``east``
    is not). As products of letters, "evil" would equal "live".
    """
    wrapped = _TEXT_COMMAND.fullmatch(text)
    bare = unwrap_text(text)
    if not bare or any(character.isdigit() for character in bare) or "\\" in bare:
        return None
    folded = " ".join(bare.split()).casefold()
    if wrapped is not None:
        return folded
    if not _WORDS.fullmatch(bare):
        return None
    words = re.split(r"[ '\-]", folded)
    return folded if max(map(len, words)) >= 4 or folded in _SHORT_WORDS else None


def unwrap_text(text: str) -> str:
    """Remove ``\\text{...}``, a final full stop, and parentheses around a single letter."""
    bare = _TEXT_COMMAND.sub(r"\1", text).strip().removesuffix(".").strip()
    return bare[1:-1] if len(bare) == 3 and bare[0] == "(" and bare[2] == ")" else bare
