"""Extract the answer from a response.

A *marked* answer is the content of the last ``\\boxed{...}``, ``\\fbox{...}`` or ``<answer>...</answer>``, by opening marker. If that
marker is never closed (the response was truncated inside its final answer), there is no marked answer: earlier markers are not used
instead.

All functions run in linear time, because a response may be a hundred kilobytes of arbitrary text.
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
    """Return whether any marker is opened, closed or not."""
    return _OPENING.search(response) is not None


def marked_answer(response: str) -> str | None:
    """Return the last marked answer, stripped; None if there is none or it is not closed."""
    last = _last_match(_OPENING, response)
    if last is None:
        return None
    if last.group()[0] == "<":
        closing = _CLOSING_TAG.search(response, last.end())
        return None if closing is None else response[last.end() : closing.start()].strip()
    end = _closing_brace(response, last.end())
    return None if end is None else response[last.end() : end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the group whose content begins at ``start``; ``\\{`` and ``\\}`` are text."""
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
    """Return the marked answer, or the whole stripped response if nothing is marked."""
    if not has_marker(response):
        return response.strip()
    return marked_answer(response) or ""


def last_number(text: str) -> str | None:
    """Return the last number in ``text`` verbatim (``-1,234.5``, ``3/4``, ``\\frac{3}{4}``, ``50%``), or None."""
    last = _last_match(_NUMBER, text)
    return None if last is None else last.group()


def marked_answer_or_last_number(response: str) -> str | None:
    """Return the marked answer, or the last number of the response if nothing is marked."""
    if not has_marker(response):
        return last_number(response)
    return marked_answer(response)


_ANSWER_LINE = re.compile(r"(?<!\w)answer[*_\s]{0,8}:[*_ \t]{0,8}([^\n]*)", re.IGNORECASE)


def answer_line(response: str) -> str | None:
    """Return the text after the last ``Answer:`` on its line, or a box in it; without ``Answer:`` the marked answer.

    The prompts of DAPO-Math-17k ask for this form (arXiv 2503.14476).
    """
    last = _last_match(_ANSWER_LINE, response)
    if last is None:
        return marked_answer(response)
    line = last.group(1).strip()
    return marked_answer(line) if has_marker(line) else line or None


def marked_answer_or_last_line(response: str) -> str:
    """Return the marked answer, or the last non-empty line if nothing is marked."""
    if not has_marker(response):
        lines = response.strip().splitlines()
        return lines[-1].strip() if lines else ""
    return marked_answer(response) or ""


def whole_response(response: str) -> str:
    """Return the whole response, for verifiers whose score may depend on any part of it."""
    return response


_STATED = re.compile(
    r"\b(?:answer|choice|option)\b(?:\s+is)?\s*:?\s*(?:\*\*|\$)*\s*((?:\\(?:text|mathrm|textbf|mathbf)\{)?\(?[A-Z]\)?\}?)(?![\w'])",
    re.IGNORECASE,
)


def choice_text(response: str) -> str | None:
    """Return the answer to a multiple-choice question.

    This is the marked answer; if nothing is marked, the last "answer is (B)" or "Answer: B", or the whole response if it is only a
    letter; else None.
    """
    if has_marker(response):
        return marked_answer(response)
    last = _last_match(_STATED, response)
    if last is not None:
        return last.group(1)
    whole = response.strip()
    return whole if len(whole) <= 4 else None
