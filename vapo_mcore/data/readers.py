"""Readers of data files: JSONL, JSON, CSV, TSV, parquet, and folders saved by Hugging Face ``datasets``.

A reader yields every readable row with its number, from 1, and records a fault for every other one; nothing is skipped silently.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vapo_mcore.data.faults import Faults, kind_of, unicode_fault

MAX_ROW_BYTES = 16 * 2**20
"""A larger row is a fault: it indicates a file without line ends rather than a long prompt."""

Rows = Iterator[tuple[int, Any]]


def read_rows(path: str, faults: Faults) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows that are objects, numbered from 1 (the line of a JSONL file); counts all rows in ``faults.rows``."""
    try:
        for number, row in _all_rows(Path(path), faults):
            faults.rows[path] += 1
            if not isinstance(row, dict):
                faults.add(path, number, None, f"a row must be an object with named fields, got {kind_of(row)}")
            else:
                yield number, row
    except OSError as error:  # no permission, name too long, file system unavailable
        faults.add(path, None, None, f"cannot be read: {error.strerror or error}")


def _all_rows(file: Path, faults: Faults) -> Rows:
    read = _reader(file, faults)
    return iter(()) if read is None else read(file, faults)


def _reader(file: Path, faults: Faults) -> Callable[[Path, Faults], Rows] | None:
    if file.is_dir():
        return _dataset_rows
    if not file.is_file():
        there = "is not a file (a device, a pipe or a broken symbolic link)" if os.path.lexists(file) else None
        faults.add(str(file), None, None, there or f"no such file (relative paths start at {str(Path.cwd())!r})")
        return None
    read = _READERS.get(file.suffix.lower())
    if read is None:
        faults.add(str(file), None, None, f"unknown format {file.suffix!r}; supported: {', '.join(_READERS)} and folders of datasets")
        return None
    if read is not _parquet_rows:
        with file.open("rb") as stream:
            start = stream.read(4)
        for mark, name in _BYTE_ORDER_MARKS.items():
            if start.startswith(mark):
                faults.add(str(file), None, None, f"is {name}; save it as UTF-8")
                return None
    return read


_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # tried first: it begins with UTF-16's mark
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def _jsonl_rows(file: Path, faults: Faults) -> Rows:
    blank: list[int] = []
    for number, line, size in _lines(file):
        if line is not None and not line.strip():
            blank.append(number)
            continue
        for empty in blank:  # blank lines at the end of the file are not rows
            faults.add(str(file), empty, None, "empty line")
        blank.clear()
        if line is None:
            _unreadable_row(file, number, f"has {size:,} bytes, more than {MAX_ROW_BYTES:,}; are the line ends missing?", faults)
            continue
        try:
            row = _with_single_keys(_parse_json(line, first=number == 1))
        except ValueError as error:
            _unreadable_row(file, number, str(error), faults)
            continue
        yield number, row


def _unreadable_row(file: Path, number: int, reason: str, faults: Faults) -> None:
    faults.rows[str(file)] += 1
    faults.add(str(file), number, None, reason)


def _lines(file: Path) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield number, text and size of each line; the text of a line above ``MAX_ROW_BYTES`` is None."""
    with file.open("rb") as stream:
        number = 0
        while part := stream.readline(MAX_ROW_BYTES + 1):
            number, size = number + 1, len(part)
            if size <= MAX_ROW_BYTES:
                yield number, part, size
                continue
            while not part.endswith(b"\n") and (part := stream.readline(MAX_ROW_BYTES)):
                size += len(part)
            yield number, None, size


def _json_rows(file: Path, faults: Faults) -> Rows:
    try:
        rows = _parse_json(file.read_bytes(), first=True)
    except ValueError as error:
        faults.add(str(file), None, None, str(error))
        return
    if not isinstance(rows, list):
        faults.add(str(file), None, None, f"a .json file must hold a list of rows, got {kind_of(rows)}; use .jsonl for one object per line")
        return
    for number, row in enumerate(rows, start=1):
        try:
            yield number, _with_single_keys(row)
        except ValueError as error:
            _unreadable_row(file, number, str(error), faults)


class _Repeated(dict[str, Any]):
    """An object with a duplicate key. JSON readers keep only the last value, so the duplicate is reported as a fault."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.key = next(key for number, key in enumerate(keys) if key in keys[:number])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Repeated(pairs)


def _with_single_keys(value: Any) -> Any:
    """Return ``value``; raises ValueError if an object in it has a duplicate key."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, _Repeated):
            raise ValueError(f"duplicate key {inner.key!r}; keep one of its values")
        parts = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        waiting += [part for part in parts if isinstance(part, dict | list)]
    return value


def _parse_json(text: bytes, *, first: bool) -> Any:
    """Decode and parse; a byte-order mark is allowed at the start of a file. Raises ValueError with a user-facing reason."""
    try:
        decoded = text.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{text[error.start]:02x} at position {error.start}") from error
    try:
        return json.loads(decoded, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    except ValueError as error:  # exceeds Python's limit on digits
        raise ValueError("not valid JSON: a number has too many digits (write it as text)") from error


def _separated_rows(file: Path, faults: Faults) -> Rows:
    """Read CSV and TSV with a header; every value is text, an empty cell is null. Rows are numbered from 1 after the header."""
    place = str(file)
    csv.field_size_limit(MAX_ROW_BYTES)
    dialect = csv.excel_tab if file.suffix.lower() == ".tsv" else csv.excel
    # Decode invalid UTF-8 as surrogate escapes, so that only the affected row is a fault (csv records may span lines).
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        records = csv.reader(stream, dialect, strict=True)
        number = -1
        header: list[str] = []
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                reason = f"line {records.line_num}: not valid CSV: {error}; the rest of the file is not read"
                faults.add(place, number + 1 or None, None, reason)
                return
            if not record:  # a blank line
                continue
            number += 1
            if number == 0:
                header = record
                if not _header_is_sound(place, header, faults):
                    return
            elif len(record) != len(header):
                reason = f"line {records.line_num}: has {len(record)} values, the header has {len(header)} columns"
                _unreadable_row(file, number, reason, faults)
            elif broken := [(name, fault) for name, value in zip(header, record, strict=True) if (fault := unicode_fault(value))]:
                faults.rows[place] += 1
                for name, fault in broken:
                    faults.add(place, number, name, fault)
            else:
                yield number, {name: value or None for name, value in zip(header, record, strict=True)}


def _header_is_sound(place: str, header: list[str], faults: Faults) -> bool:
    wrong = [fault for name in header if (fault := unicode_fault(name))]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if wrong:
        faults.add(place, None, None, f"the header {wrong[0]}")
    elif "" in header or repeated:
        what = f"repeats {', '.join(map(repr, repeated))}" if repeated and repeated != [""] else "has a column without a name"
        faults.add(place, None, None, f"the header {what}: {', '.join(map(repr, header))}")
    else:
        return True
    return False


def _parquet_rows(file: Path, faults: Faults) -> Rows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        faults.add(str(file), number + 1 if number else None, None, f"not readable as parquet: {error}")


def _dataset_rows(folder: Path, faults: Faults) -> Rows:
    """Read a folder written by ``Dataset.save_to_disk``: ``state.json`` and Arrow files in stream format."""
    place = str(folder)
    chosen = _dataset_folder(folder, faults)
    if chosen is None:
        return
    try:
        state = _parse_json((chosen / "state.json").read_bytes(), first=True)
        files = [chosen / entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_data_files") or any(file.parent != chosen for file in files):
            raise ValueError("the dataset selects rows of other files; save it again with a newer version of datasets")
    except (OSError, ValueError, KeyError, TypeError) as error:
        faults.add(place, None, None, f"state.json was not written by datasets' save_to_disk: {error}")
        return
    yield from _arrow_rows(place, files, faults)


def _arrow_rows(place: str, files: list[Path], faults: Faults) -> Rows:
    import pyarrow
    import pyarrow.ipc

    number = 0
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            faults.add(place, number + 1 if number else None, None, f"{file.name} is not readable as Arrow: {error}")
            return


def _dataset_folder(folder: Path, faults: Faults) -> Path | None:
    """Return the folder with the rows: ``folder`` itself, or the only split of a DatasetDict."""
    if (folder / "state.json").is_file():
        return folder
    if not (folder / "dataset_dict.json").is_file():
        tables = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _READERS)
        hint = f"; give one of its files, {', '.join(tables[:5])}" if tables else ""
        faults.add(str(folder), None, None, f"a folder must be written by datasets' save_to_disk (with state.json){hint}")
        return None
    splits = sorted(part.name for part in folder.iterdir() if (part / "state.json").is_file())
    if len(splits) == 1:
        return folder / splits[0]
    faults.add(str(folder), None, None, f"holds {len(splits)} splits ({', '.join(splits)}); give the folder of one: {folder / 'train'}")
    return None


_READERS: dict[str, Callable[[Path, Faults], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _separated_rows,
    ".tsv": _separated_rows,
    ".parquet": _parquet_rows,
}
