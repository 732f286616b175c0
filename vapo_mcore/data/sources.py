"""Reading and checking the sources of prompts: JSONL, JSON and parquet files, reasoning-gym tasks, and tasks of the user's own.

Needs neither torch nor a tokenizer, so that all faults of all files can be reported before anything large is loaded.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vapo_mcore.config.schema import CustomSource, DataConfig, FieldsConfig, FileSource, ReasoningGymSource
from vapo_mcore.errors import ConfigError, DataError
from vapo_mcore.extensions.loading import describe, load_function

SHOWN_FAULTS = 20
_FORMATS = (".jsonl", ".json", ".parquet")
_ROLES = ("system", "user", "assistant", "tool")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Problem:
    """A prompt with its ground truth as its source gives it, checked, not yet put into a template or tokenized.

    ``problem_id`` is ``<source name>/<id or row number>``; ``prompt`` is a text or a list of chat messages; ``file`` and ``row``
    say in messages where it stands.
    """

    problem_id: str
    prompt: str | Messages
    ground_truth: str
    source: str
    verifier: str
    metadata: dict[str, Any]
    file: str
    row: int


@dataclass
class Faults:
    """All faults found in the data, counted per file; the first ones kept for the message."""

    shown: list[str] = field(default_factory=list)
    count: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    def add(self, file: str, row: int | None, name: str | None, reason: str) -> None:
        """Note a fault in ``row`` (from 1; None: the whole file) and field ``name``."""
        self.count[file] = self.count.get(file, 0) + 1
        if len(self.shown) < SHOWN_FAULTS:
            place = file + (f", row {row}" if row is not None else "") + (f", field {name!r}" if name is not None else "")
            self.shown.append(f"{place}: {reason}")

    def raise_if_any(self) -> None:
        """Raise one DataError with the number of faults, per file too, and the first ``SHOWN_FAULTS`` of them."""
        total = sum(self.count.values())
        if total == 0:
            return
        files = "; ".join(f"{file}: {n} ({self.rows.get(file, 0)} rows read)" for file, n in self.count.items())
        lines = [f"{total} fault{'s' if total > 1 else ''} in the data: {files}", *self.shown]
        if total > len(self.shown):
            lines.append(f"... and {total - len(self.shown)} more")
        raise DataError("\n  ".join(lines))


def check_files(data: DataConfig) -> None:
    """Read and check all sources of both splits, and raise one DataError for everything that is wrong with them."""
    faults = Faults()
    for source in (*data.train, *data.eval):
        read_source(source, data, faults)
    faults.raise_if_any()


def read_source(source: FileSource | ReasoningGymSource | CustomSource, data: DataConfig, faults: Faults) -> list[Problem]:
    """The sound rows of a source in order; what is wrong with the others goes to ``faults``."""
    if isinstance(source, ReasoningGymSource):
        return list(_procedural(source, faults))
    if isinstance(source, CustomSource):
        return list(_problems(source.function, _custom_rows(source, faults), FieldsConfig(), source, data, faults))
    return list(_problems(source.path, _rows(source.path, faults), source.fields, source, data, faults))


def _problems(
    place: str,
    rows: Iterable[tuple[int, dict[str, Any]]],
    fields: FieldsConfig,
    source: FileSource | CustomSource,
    data: DataConfig,
    faults: Faults,
) -> Iterator[Problem]:
    """The sound ones among numbered rows; ``place`` is where they stand, for messages."""
    seen: dict[str, int] = {}
    faults.rows[place] = 0
    for number, row in rows:
        faults.rows[place] += 1
        check = _RowCheck(place, number, row, faults)
        prompt = check.prompt(fields.prompt, data)
        answer = check.answer(fields.answer)
        name = str(number) if fields.id is None else check.id(fields.id)
        if name is not None and name in seen:
            faults.add(place, number, fields.id, f"id {name!r} is already that of row {seen[name]}")
        elif name is not None:
            seen[name] = number
        if prompt is None or answer is None or name is None:
            continue
        rest = {key: value for key, value in row.items() if key not in (fields.prompt, fields.answer)}
        yield Problem(f"{source.name}/{name}", prompt, answer, source.name, source.verifier, rest, place, number)
    if not faults.rows[place] and place not in faults.count:
        faults.add(place, None, None, "has no rows")


def _custom_rows(source: CustomSource, faults: Faults) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows that a user's function returns, numbered from 1."""
    try:
        found = load_function(source.function)(**source.options)
    except ConfigError as error:
        faults.add(source.function, None, None, str(error))
        return
    except Exception as error:  # noqa: BLE001 (whatever a user's function raises is told)
        faults.add(source.function, None, None, f"failed: {describe(error)}")
        return
    if not isinstance(found, Iterable):
        faults.add(source.function, None, None, f"must return rows (a list or a generator), got {_kind(found)}")
        return
    rows = islice(found, source.size)
    for number in range(1, 2**31):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001
            faults.add(source.function, number, None, f"failed: {describe(error)}")
            return
        if isinstance(row, dict) and all(isinstance(key, str) for key in row):
            yield number, row
        else:
            faults.rows[source.function] += 1
            faults.add(source.function, number, None, f"a row must be a dict with named fields, got {_kind(row)}")


def _rows(path: str, faults: Faults) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows that are objects, with their numbers from 1 (the line in a JSONL file)."""
    file = Path(path)
    if not file.is_file():
        faults.add(path, None, None, f"no such file (relative paths start at {str(Path.cwd())!r})")
        return
    read = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}.get(file.suffix.lower())
    if read is None:
        faults.add(path, None, None, f"unknown format {file.suffix!r}; known are {', '.join(_FORMATS)}")
        return
    for number, row in read(file, faults):
        if isinstance(row, dict):
            yield number, row
        else:
            faults.rows[path] += 1
            faults.add(path, number, None, f"a row must be an object with named fields, got {_kind(row)}")


def _jsonl_rows(file: Path, faults: Faults) -> Iterator[tuple[int, Any]]:
    blank: list[int] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                blank.append(number)
                continue
            for empty in blank:  # only those before a further row: blank lines at the end are not rows
                faults.add(str(file), empty, None, "empty line")
            blank.clear()
            try:
                row = _parse_json(line, first=number == 1)
            except ValueError as error:
                faults.rows[str(file)] += 1
                faults.add(str(file), number, None, str(error))
                continue
            yield number, row


def _json_rows(file: Path, faults: Faults) -> Iterator[tuple[int, Any]]:
    try:
        rows = _parse_json(file.read_bytes(), first=True)
    except ValueError as error:
        faults.add(str(file), None, None, str(error))
        return
    if not isinstance(rows, list):
        faults.add(str(file), None, None, f"a .json file must hold a list of rows, got {_kind(rows)}; one object a line is .jsonl")
        return
    yield from enumerate(rows, start=1)


def _parquet_rows(file: Path, faults: Faults) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        faults.add(str(file), number + 1 if number else None, None, f"not readable as parquet: {error}")


def _parse_json(text: bytes, *, first: bool) -> Any:
    """Decode and parse; a byte-order mark is allowed at the start of a file. ValueError with a reason for people."""
    try:
        decoded = text.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{text[error.start]:02x} at position {error.start}") from error
    try:
        return json.loads(decoded)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    except ValueError as error:  # Python's limit of digits
        raise ValueError("not valid JSON: a number has too many digits (write it as text)") from error


class _RowCheck:
    """The checks of one row; each returns the value, or notes the fault and returns None."""

    def __init__(self, file: str, number: int, row: dict[str, Any], faults: Faults) -> None:
        self.file, self.number, self.row, self.faults = file, number, row, faults

    def _fault(self, name: str, reason: str) -> None:
        self.faults.add(self.file, self.number, name, reason)

    def _get(self, name: str) -> Any:
        """The value of a dotted field, or None after a fault when it is missing or null."""
        value: Any = self.row
        for depth, part in enumerate(name.split(".")):
            inside = ".".join(name.split(".")[:depth])
            if not isinstance(value, dict):
                self._fault(name, f"{inside!r} must be an object to look {part!r} up in, got {_kind(value)}")
                return None
            if part not in value:
                holder = f"{inside!r}" if inside else "the row"
                self._fault(name, f"missing; {holder} has {', '.join(sorted(map(str, value))) or 'no fields'}")
                return None
            value = value[part]
        if value is None:
            self._fault(name, "is null")
        return value

    def prompt(self, name: str, data: DataConfig) -> str | Messages | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, list):
            return self._messages(name, value, data)
        if isinstance(value, str):
            return value if self._is_text(name, value) else None
        self._fault(name, f"must be a text or a list of messages, got {_kind(value)}")
        return None

    def _messages(self, name: str, value: list[Any], data: DataConfig) -> Messages | None:
        if not data.chat_template:
            self._fault(name, "a list of messages needs data.chat_template: true; without it a prompt must be a text")
            return None
        if not value:
            self._fault(name, "is an empty list of messages")
            return None
        messages: Messages = []
        for index, message in enumerate(value):
            at = f"{name}[{index}]"
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                self._fault(at, f"a message must be an object with 'role' and 'content', got {_kind(message)}")
                return None
            role, content = message["role"], message["content"]
            if role not in _ROLES:
                self._fault(f"{at}.role", f"must be one of {', '.join(_ROLES)}, got {role!r}")
                return None
            if not isinstance(content, str):
                self._fault(f"{at}.content", f"must be a text, got {_kind(content)}")
                return None
            if not self._is_text(f"{at}.content", content):
                return None
            messages.append({"role": role, "content": content})
        if messages[-1]["role"] != "user":
            self._fault(name, f"the last message must be the user's, got {messages[-1]['role']!r}")
            return None
        if data.system_prompt is not None and messages[0]["role"] == "system":
            self._fault(name, "has a system message of its own, so data.system_prompt cannot be put before it; drop one of the two")
            return None
        return messages

    def answer(self, name: str) -> str | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return value if self._is_text(name, value) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self._fault(name, f"must be a text or a finite number, got {_kind(value)}")
            return None
        return str(value)

    def id(self, name: str) -> str | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            self._fault(name, f"must be a text or a whole number, got {_kind(value)}")
            return None
        return str(value) if not isinstance(value, str) or self._is_text(name, value) else None

    def _is_text(self, name: str, value: str) -> bool:
        if not value.strip():
            self._fault(name, "is empty")
            return False
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self._fault(name, f"is not valid Unicode: lone surrogate at position {error.start}")
            return False
        return True


def _kind(value: Any) -> str:
    """The value's type in the words of a data file, with a short value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    if value is None:
        return "null"
    shown = repr(value)
    return f"{names.get(type(value), type(value).__name__)}: {shown if len(shown) <= 60 else shown[:57] + '...'}"


_GENERATION_ERRORS = (ArithmeticError, AssertionError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)


def _procedural(source: ReasoningGymSource, faults: Faults) -> Iterator[Problem]:
    """Problems of a reasoning-gym task; ``metadata`` holds what the task's own scorer needs (see ``rewards.procedural``)."""
    from reasoning_gym.factory import DATASETS, create_dataset

    place = f"reasoning_gym task {source.task!r}"
    if source.task not in DATASETS:
        near = difflib.get_close_matches(source.task, DATASETS, n=3)
        faults.add(place, None, None, f"there is no such task{'; did you mean ' + ' or '.join(map(repr, near)) + '?' if near else ''}")
        return
    fixed = sorted({"size", "seed"} & source.options.keys())
    if fixed:
        faults.add(place, None, "options", f"{' and '.join(fixed)}: to be given beside 'task', not inside 'options'")
        return
    try:
        dataset = create_dataset(source.task, size=source.size, seed=source.seed, **source.options)
        entries = [dataset[index] for index in range(source.size)]
    except _GENERATION_ERRORS as error:
        faults.add(place, None, "options", f"{type(error).__name__}: {error}")
        return
    faults.rows[place] = source.size
    for number, entry in enumerate(entries, start=1):
        question = entry["question"]
        # Some tasks have many right answers and give none: their scorer judges by the entry's metadata.
        answer = "" if entry["answer"] is None else str(entry["answer"])
        metadata = {"task": source.task, "options": source.options, "question": question, "entry_metadata": entry["metadata"]}
        yield Problem(f"{source.name}/{number}", question, answer, source.name, "reasoning_gym", metadata, place, number)
