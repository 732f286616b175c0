"""Reading ``metrics.jsonl``, of runs that are over and of runs that go on. Loads nothing heavy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from vapo_mcore.errors import DataError

Row = dict[str, Any]

STAGES = ("value_pretraining", "rl")
_LARGEST = 1e300  # of a number: sums over a run stay finite
_SHOWN = 60  # characters of a value in a message


def metric_rows(path: Path) -> list[Row]:
    """All rows of a metrics.jsonl, in order. Raises DataError, with the line, for a file that is absent or damaged."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a run directory that has a metrics.jsonl") from error
    return [_row(path, number, line) for number, line in enumerate(lines, 1)]


def whole_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl without a last one that is torn, of a run that was killed or goes on. Raises what metric_rows raises."""
    try:
        path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a run directory that has a metrics.jsonl") from error
    metrics = GrowingMetrics(path)
    metrics.refresh()
    return metrics.rows


class GrowingMetrics:
    """The rows of a run that may still be written; ``refresh`` reads what is new.

    The end of a row that is not there yet is waited for. A resumed run cuts the file and goes on from there: it is then read anew, which
    the last row that was read, no longer where it was, gives away.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._read = 0  # bytes
        self._last = b""  # the last line that was read, with its end

    def refresh(self) -> bool:
        """Read on; whether there is anything new. Raises DataError, with the line, for a row that is damaged."""
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
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, and lists in lists without end
        raise DataError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict) or not _is_step(row.get("step")):
        raise DataError(f"{path}, line {number}: expected an object with an integer 'step' from 0 to 2**31 - 1")
    faults = [f"{name!r} is {_short(value)}, expected {fault}" for name, value in row.items() if (fault := _fault(name, value, row))]
    if faults:
        raise DataError(f"{path}, line {number}: {'; '.join(faults)}")
    return row


def is_number(value: object) -> bool:
    """Whether a value of JSON is a number that can be counted with: no bool, finite, and its sums too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _fault(name: str, value: object, row: Row) -> str | None:
    """What the trainer writes where ``value`` is something else: lists for distributions, a number or null for other metrics."""
    if name == "stage":
        return None if value in STAGES else f"one of {', '.join(STAGES)}"
    if name == "metrics/nonfinite":
        return None if isinstance(value, list) and all(isinstance(item, str) for item in value) else "a list of names"
    profile = re.fullmatch(r"critic/(values|returns|tokens|explained_variance)_by_(position|length|prediction)", name)
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
    """A value of JSON for a message."""
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return "an integer out of all bounds"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
