"""Which part of a response is its answer.

A *marked* answer is the content of the last ``\\boxed{...}``, ``\\fbox{...}`` or ``<answer>...</answer>``. The marker
that is opened last decides. If that one is never closed (the response was cut inside its final answer), there is no
marked answer: an earlier marker is not a substitute for the one that the model was about to give.

All functions take linear time: a response may be a hundred kilobytes of anything.
"""

from __future__ import annotations

import re
from collections import deque

_OPENING = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|<answer>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"(?<![\w.])[-+\u2212]?(?:\\d?frac\{{-?\d+\}}\{{\d+\}}|\$?{_DIGITS}(?:\.\d+)?(?:/\d+)?|\.\d+)(?:\s?\\?%)?")


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def has_marker(response: str) -> bool:
    """Whether a marker is opened anywhere, closed or not."""
    return _OPENING.search(response) is not None


def marked_answer(response: str) -> str | None:
    """The last marked answer, without surrounding whitespace; None if there is none or if it is not closed."""
    last = _last_match(_OPENING, response)
    if last is None:
        return None
    if last.group()[0] == "<":
        closing = _CLOSING_TAG.search(response, last.end())
        return None if closing is None else response[last.end() : closing.start()].strip()
    end = _closing_brace(response, last.end())
    return None if end is None else response[last.end() : end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the group whose content begins at ``start``; ``\\{`` and ``\\}`` are text."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        symbol = match.group()
        if symbol == "{":
            depth += 1
        elif symbol == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def marked_answer_or_all(response: str) -> str:
    """The marked answer; if nothing is marked, the whole response without surrounding whitespace."""
    if not has_marker(response):
        return response.strip()
    return marked_answer(response) or ""


def last_number(text: str) -> str | None:
    """The last number in ``text`` as it stands there: ``-1,234.5``, ``3/4``, ``\\frac{3}{4}``, ``50%``; None if none."""
    last = _last_match(_NUMBER, text)
    return None if last is None else last.group()


def marked_answer_or_last_number(response: str) -> str | None:
    """The marked answer; if nothing is marked, the last number of the response."""
    if not has_marker(response):
        return last_number(response)
    return marked_answer(response)


_ANSWER_LINE = re.compile(r"(?<!\w)answer[*_\s]{0,8}:[*_ \t]{0,8}([^\n]*)", re.IGNORECASE)


def answer_line(response: str) -> str | None:
    """What follows the last ``Answer:`` on its line, or the box in it; in a response without ``Answer:`` the marked answer.

    The form that the prompts of DAPO-Math-17k ask for (arXiv 2503.14476).
    """
    last = _last_match(_ANSWER_LINE, response)
    if last is None:
        return marked_answer(response)
    line = last.group(1).strip()
    return marked_answer(line) if has_marker(line) else line or None


def marked_answer_or_last_line(response: str) -> str:
    """The marked answer; if nothing is marked, the last line that is not empty."""
    if not has_marker(response):
        lines = response.strip().splitlines()
        return lines[-1].strip() if lines else ""
    return marked_answer(response) or ""


def whole_response(response: str) -> str:
    """Everything: for verifiers whose judgement may depend on any part."""
    return response


_STATED = re.compile(
    r"\b(?:answer|choice|option)\b(?:\s+is)?\s*:?\s*(?:\*\*|\$)*\s*((?:\\(?:text|mathrm|textbf|mathbf)\{)?\(?[A-Z]\)?\}?)(?![\w'])",
    re.IGNORECASE,
)


def choice_text(response: str) -> str | None:
    """For multiple choice: the marked answer; if nothing is marked, the last "answer is (B)" or "Answer: B",
    or the whole response if it is no more than a letter; else None."""
    if has_marker(response):
        return marked_answer(response)
    last = _last_match(_STATED, response)
    if last is not None:
        return last.group(1)
    whole = response.strip()
    return whole if len(whole) <= 4 else None
