"""Read ``metrics.jsonl`` of finished and of running runs. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vapo_mcore.errors import DataError

Row = dict[str, Any]

STAGES = ("value_pretraining", "rl")
_LARGEST = 1e300  # bound on numbers, so that sums over a run stay finite
_SHOWN = 60  # maximum characters of a value in a message


def metric_rows(path: Path) -> list[Row]:
    """Read all rows of a metrics.jsonl. Raises DataError for a missing file or, with the line number, a damaged row."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a run directory that has a metrics.jsonl") from error
    return [_row(path, number, line) for number, line in enumerate(lines, 1)]


def whole_rows(path: Path) -> list[Row]:
    """Read all complete rows of a metrics.jsonl; the last row of a killed or running run may be incomplete. Raises like metric_rows."""
    try:
        path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a run directory that has a metrics.jsonl") from error
    metrics = GrowingMetrics(path)
    metrics.refresh()
    return metrics.rows


class GrowingMetrics:
    """Reads the rows of a run that may still be running; ``refresh`` reads new rows.

    An incomplete last row is read at the next refresh. A resumed run truncates the file and appends to it: if the last row read is no
    longer at its offset, the file is read again from the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._read = 0  # bytes
        self._last = b""  # the last line read, with its line break

    def refresh(self) -> bool:
        """Read new rows and return whether anything changed. Raises DataError, with the line number, for a damaged row."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read - len(self._last))
                kept = file.read(len(self._last)) == self._last
                if not kept:
                    self.rows, self._read, self._last = [], 0, b""
                    file.seek(0)
                new = file.read()
        except FileNotFoundError:
            new, kept = b"", not self.rows
            self.rows, self._read, self._last = [], 0, b""
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        lines = new[: new.rfind(b"\n") + 1].splitlines(keepends=True)
        for line in lines:
            self.rows.append(_row(self.path, len(self.rows) + 1, line))
            self._read, self._last = self._read + len(line), line
        return bool(lines) or not kept


def _row(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, or deeply nested lists
        raise DataError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict) or not is_count(row.get("step")):
        raise DataError(f"{path}, line {number}: expected an object with an integer 'step' from 0 to 2**31 - 1")
    faults = [f"{name!r} is {_short(value)}, expected {fault}" for name, value in row.items() if (fault := _fault(name, value, row))]
    if faults:
        raise DataError(f"{path}, line {number}: {'; '.join(faults)}")
    return row


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number (not a bool) that is finite and small enough for finite sums."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def finite_number(value: object) -> float | None:
    """Return a JSON value as a float; None unless it is a number that :func:`is_number` accepts."""
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def is_count(value: object) -> bool:
    """Return whether a JSON value is a whole number from 0 to 2**31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _fault(name: str, value: object, row: Row) -> str | None:
    """Return the expected type if ``value`` does not have it, else None: lists for distributions, a number or null for other metrics."""
    if name == "stage":
        return None if value in STAGES else f"one of {', '.join(STAGES)}"
    if name == "metrics/nonfinite":
        return None if isinstance(value, list) and all(isinstance(item, str) for item in value) else "a list of names"
    profile = re.fullmatch(r"critic/(values|returns|tokens|explained_variance)_by_(position|length|prediction|cut)", name)
    if profile is None and not name.endswith("_histogram"):
        return None if value is None or is_number(value) else "a number or null"
    if value is None:
        return None
    counts = profile is None or profile[1] == "tokens"
    if not isinstance(value, list) or not all(is_number(item) or (item is None and not counts) for item in value):
        return "a list of numbers" if counts else "a list of numbers and nulls"
    if profile is not None and profile[1] == "tokens":
        means = [row.get(f"critic/{what}_by_{profile[2]}") for what in ("values", "returns")]
        if value and not all(isinstance(mean, list) and len(mean) == len(value) for mean in means):
            return f"as many as critic/values_by_{profile[2]} and critic/returns_by_{profile[2]} have"
    return None


def _short(value: object) -> str:
    """Format a JSON value for a message."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return "a number that is too large"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
