"""Reading ``metrics.jsonl``, of runs that are over and of runs that go on. Loads nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vapo_mcore.errors import DataError

Row = dict[str, Any]


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
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise DataError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(f"{path}, line {number}: expected an object with an integer 'step'")
    return row
