"""Faults of the data, collected over all files and reported together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vapo_mcore.errors import DataError

if TYPE_CHECKING:
    from vapo_mcore.data.schemas import Schema

SHOWN_FAULTS = 20


@dataclass(frozen=True)
class Fault:
    """One fault: ``reason``, in ``field`` (None: the whole row) of ``row`` (from 1; None: the whole file)."""

    file: str
    row: int | None
    field: str | None
    reason: str

    def __str__(self) -> str:
        place = self.file + (f", row {self.row}" if self.row is not None else "") + (f", field {self.field!r}" if self.field else "")
        return f"{place}: {self.reason}"


@dataclass
class Faults:
    """Counts all faults per file and keeps the first ``kept`` of them (None: all).

    ``rows``: rows read per file; ``schemas``: detected columns per file.
    """

    kept: int | None = SHOWN_FAULTS
    found: list[Fault] = field(default_factory=list)
    count: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    schemas: dict[str, Schema] = field(default_factory=dict)

    def add(self, file: str, row: int | None, name: str | None, reason: str) -> None:
        """Record a fault in ``row`` (from 1; None: the whole file) and field ``name``."""
        self.count[file] = self.count.get(file, 0) + 1
        if self.kept is None or len(self.found) < self.kept:
            self.found.append(Fault(file, row, name, reason))

    def raise_if_any(self) -> None:
        """Raise one DataError with the number of faults, in total and per file, and the first ``SHOWN_FAULTS`` of them."""
        total = sum(self.count.values())
        if total == 0:
            return
        files = "; ".join(f"{file}: {n} ({self.rows.get(file, 0)} rows read)" for file, n in self.count.items())
        order = {file: number for number, file in enumerate(self.count)}
        found = sorted(self.found[:SHOWN_FAULTS], key=lambda fault: (order[fault.file], fault.row or 0))  # readers run ahead of checks
        lines = [f"{total} fault{'s' if total > 1 else ''} in the data: {files}", *map(str, found)]
        if total > SHOWN_FAULTS:
            lines.append(f"... and {total - SHOWN_FAULTS} more")
        raise DataError("\n  ".join(lines))


def kind_of(value: Any) -> str:
    """Return the value's type in data-file terms and the value, shortened, for a message."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    if value is None:
        return "null"
    shown = repr(value)
    return f"{names.get(type(value), type(value).__name__)}: {shown if len(shown) <= 60 else shown[:57] + '...'}"


def unicode_fault(value: str) -> str | None:
    """Return why ``value`` is not valid text, or None. Readers decode bytes that are not UTF-8 as surrogate escapes (PEP 383)."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"is not UTF-8: byte 0x{code - 0xDC00:02x} at character {error.start}"
        return f"is not valid Unicode: lone surrogate at position {error.start}"
    return None
