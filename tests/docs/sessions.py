"""Terminal sessions recorded in the pages: ``console`` blocks of commands and what they print, compared with what they print now."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.docs.pages import PAGES, fenced_blocks

ELISION = "..."
_PATTERNS = (
    (r"\x1b\[[\d;]*m", ""),
    (r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?", "#"),
    (r"(?<![\w.-])-(?![\w>-])", "#"),  # an undefined value, printed as a dash
    (r"\s+", " "),
)
_WAITING = re.compile(r": # s$")
"""End of the lines that are printed every ten seconds: how many depends on the machine."""


def recorded_sessions(page: Path) -> dict[str, list[str]]:
    """Return the lines printed by each command of a page's ``console`` blocks."""
    found: dict[str, list[str]] = {}
    for language, lines in fenced_blocks(page):
        if language != "console":
            continue
        assert lines[0].startswith("$ "), f"{page.name}: a console block begins with a command: {lines[0]!r}"
        for line in lines:
            if line.startswith("$ "):
                printed = found.setdefault(line.removeprefix("$ "), [])
                assert not printed, f"{page.name}: {line} is recorded twice"
            elif line.strip():
                printed.append(line)
    return found


def masked(line: str) -> str:
    """Replace what differs between runs of one command: numbers, colours, widths of columns."""
    for pattern, replacement in _PATTERNS:
        line = re.sub(pattern, replacement, line)
    return line.strip()


def first_difference(recorded: Sequence[str], output: str) -> str | None:
    """Return the first recorded line that ``output`` lacks, or None. Lines must come in the recorded order.

    Numbers are ignored. A line ``...`` stands for any lines; without one, lines must follow each other directly. Lines that repeat an
    activity and its seconds are skipped on both sides, as are empty ones.
    """
    wanted = [masked(line) for line in recorded]
    wanted = [line for line in wanted if line and not _WAITING.search(line)]
    printed = [masked(line) for line in output.splitlines()]
    printed = [line for line in printed if line and not _WAITING.search(line)]
    at, segments = 0, _segments(wanted)
    for number, segment in enumerate(segments):
        if number == 0:
            starts = range(1)
        elif number == len(segments) - 1 and segment:  # nothing may follow it
            starts = range(max(at, len(printed) - len(segment)), max(at, len(printed) - len(segment)) + 1)
        else:
            starts = range(at, len(printed) + 1)
        agreed = [
            next((n for n, line in enumerate(segment) if printed[start + n : start + n + 1] != [line]), len(segment)) for start in starts
        ]
        if max(agreed) < len(segment):
            return segment[max(agreed)]
        at = starts[agreed.index(len(segment))] + len(segment)
    return None if len(segments) > 1 or at == len(printed) else f"end of the output, instead of: {printed[at]}"


def _segments(lines: Sequence[str]) -> list[list[str]]:
    """Return the runs of lines between elisions."""
    segments: list[list[str]] = [[]]
    for line in lines:
        if line == ELISION:
            segments.append([])
        else:
            segments[-1].append(line)
    return segments


SESSIONS = {command: lines for page in PAGES for command, lines in recorded_sessions(page).items()}
