"""Read and check the prompt sources: data files (``readers``), reasoning-gym tasks, and user-defined tasks.

Imports neither torch nor a tokenizer, so that all faults are reported before anything large is loaded.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Any, Literal

from vapo_mcore.config.schema import CustomSource, DataConfig, FieldsConfig, FileSource, ReasoningGymSource
from vapo_mcore.config.verifiers import MATH_VERIFIERS
from vapo_mcore.data.faults import Faults, kind_of, unicode_fault
from vapo_mcore.data.readers import read_rows
from vapo_mcore.data.schemas import PLAIN, Schema, choose_schema
from vapo_mcore.environments.types import RESERVED, RIGHT_ANSWERS
from vapo_mcore.errors import ConfigError
from vapo_mcore.extensions.loading import describe, load_function
from vapo_mcore.extensions.signature import signature_faults

_ROLES = ("system", "user", "assistant", "tool")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Problem:
    """A checked prompt with its ground truth, before templating and tokenization.

    ``problem_id`` is ``<source name>/<id or row number>``; ``prompt`` is a text or a list of chat messages; ``file`` and ``row`` locate
    it in messages; ``subsets`` holds the fields that evaluations are split by.
    """

    problem_id: str
    prompt: str | Messages
    ground_truth: str
    source: str
    verifier: str
    metadata: dict[str, Any]
    file: str
    row: int
    subsets: dict[str, str] = field(default_factory=dict)


def check_files(data: DataConfig, splits: Sequence[Literal["train", "eval"]] = ("train", "eval")) -> None:
    """Read and check all sources of the splits. Raises one DataError with all faults."""
    faults = Faults()
    for split in splits:
        for source in data.train if split == "train" else data.eval:
            read_source(source, data, faults)
    faults.raise_if_any()


def read_source(source: FileSource | ReasoningGymSource | CustomSource, data: DataConfig, faults: Faults) -> list[Problem]:
    """Return the valid rows of a source in order; adds the faults of the others to ``faults``."""
    if isinstance(source, ReasoningGymSource):
        return list(_procedural(source, faults))
    if isinstance(source, CustomSource):
        faults.rows[source.function] = 0
        return list(_problems(source.function, _custom_rows(source, faults), PLAIN, FieldsConfig(), source, data, faults))
    faults.rows[source.path] = 0
    schema, rows = choose_schema(source.fields, islice(read_rows(source.path, faults), source.size))
    faults.schemas[source.path] = schema
    return list(_problems(source.path, rows, schema, source.fields, source, data, faults))


def _problems(
    place: str,
    rows: Iterable[tuple[int, dict[str, Any]]],
    schema: Schema,
    fields: FieldsConfig,
    source: FileSource | CustomSource,
    data: DataConfig,
    faults: Faults,
) -> Iterator[Problem]:
    """Yield the valid ones among numbered rows; ``place`` locates them in messages."""
    seen: dict[str, int] = {}
    for number, row in rows:
        check = _RowCheck(place, number, row, faults)
        prompt = check.prompt(schema.prompt, data)
        answers = check.answers(schema, source)
        name = str(number) if fields.id is None else check.id(fields.id)
        if name is not None and name in seen:
            faults.add(place, number, fields.id, f"id {name!r} is already used by row {seen[name]}")
        elif name is not None:
            seen[name] = number
        subsets = {key: check.subset(key) for key in fields.subsets}
        for key in RESERVED.keys() & row.keys():
            faults.add(place, number, key, f"this name is reserved ({RESERVED[key]}); rename the column")
        if prompt is None or answers is None or name is None or None in subsets.values():
            continue
        rest = {key: value for key, value in row.items() if key not in (schema.prompt, schema.answer)}
        known = {key: value for key, value in subsets.items() if value is not None}
        if len(answers) > 1:
            rest[RIGHT_ANSWERS] = answers
        answer = answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)
        yield Problem(f"{source.name}/{name}", prompt, answer, source.name, source.verifier, rest, place, number, known)
    if not faults.rows[place] and place not in faults.count:
        faults.add(place, None, None, "has no rows")


def _custom_rows(source: CustomSource, faults: Faults) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows that a user's function returns, numbered from 1."""
    try:
        function = load_function(source.function)
        for fault in signature_faults(function, (), source.options, {}):
            faults.add(source.function, None, None, fault)
        if source.function in faults.count:
            return
        found = function(**source.options)
    except ConfigError as error:
        faults.add(source.function, None, None, str(error))
        return
    except Exception as error:  # noqa: BLE001 (any exception of a user's function is reported)
        faults.add(source.function, None, None, f"failed: {describe(error)}")
        return
    if not isinstance(found, Iterable):
        faults.add(source.function, None, None, f"must return rows (a list or a generator), got {kind_of(found)}")
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
        faults.rows[source.function] += 1
        if isinstance(row, dict) and all(isinstance(key, str) for key in row):
            yield number, row
        else:
            faults.add(source.function, number, None, f"a row must be a dict with named fields, got {kind_of(row)}")


def listed_answers(value: Any) -> list[str] | None:
    """Return the answers in a text that is a JSON list of texts, such as ``["34"]``; None for other values. ``[1, 2]`` is an interval."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, list) and found and all(isinstance(answer, str) for answer in found) else None


def _has_comma(answer: str) -> bool:
    """Return whether a comma is outside brackets."""
    depth = 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            return True
    return False


class _RowCheck:
    """Checks one row; each method returns the value, or records a fault and returns None."""

    def __init__(self, file: str, number: int, row: dict[str, Any], faults: Faults) -> None:
        self.file, self.number, self.row, self.faults = file, number, row, faults

    def _fault(self, name: str, reason: str) -> None:
        self.faults.add(self.file, self.number, name, reason)

    def _get(self, name: str) -> Any:
        """Return the value of a dotted field, or None after recording a fault if it is missing or null."""
        value: Any = self.row
        for depth, part in enumerate(name.split(".")):
            inside = ".".join(name.split(".")[:depth])
            if not isinstance(value, dict):
                self._fault(name, f"{inside!r} must be an object with field {part!r}, got {kind_of(value)}")
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
        self._fault(name, f"must be a text or a list of messages, got {kind_of(value)}")
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
                self._fault(at, f"a message must be an object with 'role' and 'content', got {kind_of(message)}")
                return None
            role, content = message["role"], message["content"]
            if role not in _ROLES:
                self._fault(f"{at}.role", f"must be one of {', '.join(_ROLES)}, got {role!r}")
                return None
            if not isinstance(content, str):
                self._fault(f"{at}.content", f"must be a text, got {kind_of(content)}")
                return None
            if not self._is_text(f"{at}.content", content):
                return None
            messages.append({"role": role, "content": content})
        if messages[-1]["role"] != "user":
            self._fault(name, f"the last message must be the user's, got {messages[-1]['role']!r}")
            return None
        if data.system_prompt is not None and messages[0]["role"] == "system":
            self._fault(name, "has a system message, so data.system_prompt cannot be added; remove one of the two")
            return None
        return messages

    def answers(self, schema: Schema, source: FileSource | CustomSource) -> list[str] | None:
        """Read the ground truth; a list if any of several answers is right."""
        value = self._get(schema.answer)
        if value is None:
            return None
        several = value if isinstance(value, list) else listed_answers(value) if source.verifier in MATH_VERIFIERS else None
        if several is None:
            answer = self._answer(schema, value)
            return None if answer is None else [answer]
        return self._several(schema, several, source)

    def _several(self, schema: Schema, values: list[Any], source: FileSource | CustomSource) -> list[str] | None:
        """Read the answers of a list; joined into one text if all are required."""
        name = schema.answer
        if not values:
            self._fault(name, "is an empty list of answers")
            return None
        found = [self._answer(schema, value, f"{name}[{index}]") for index, value in enumerate(values)]
        answers = list(dict.fromkeys(answer for answer in found if answer is not None))
        if None in found:
            return None
        if len(found) == 1:
            return answers
        how = source.fields.answer_list if isinstance(source, FileSource) else source.answer_list
        if how is None:
            self._fault(
                name,
                f"is a list of {len(found)} answers; set answer_list: any (each of them is right) or all (all are required)",
            )
            return None
        if how == "any":
            return answers
        if source.verifier not in MATH_VERIFIERS:
            self._fault(name, f"is a list of answers; answer_list: all is for {', '.join(MATH_VERIFIERS)}, not for {source.verifier}")
            return None
        # A list of values in any order is one answer to these verifiers, each value as often as the ground truth has it.
        values = [answer.strip().removeprefix("$").removesuffix("$").strip() for answer in found if answer is not None]
        mixed = [value for value in values if _has_comma(value)]
        if mixed:
            self._fault(name, f"answer_list: all cannot take {mixed[0]!r}: a comma outside brackets would begin a further answer")
            return None
        return [", ".join(values)]

    def _answer(self, schema: Schema, value: Any, place: str | None = None) -> str | None:
        name = schema.answer if place is None else place
        if isinstance(value, str):
            if schema.marker is not None:
                if schema.marker not in value:
                    self._fault(name, f"has no {schema.marker!r} before the final answer, which {schema.name} requires")
                    return None
                value = value.rpartition(schema.marker)[2].strip()
            return value if self._is_text(name, value) else None
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            self._fault(name, f"must be a text or a finite number, got {kind_of(value)}")
            return None
        return self._written(name, value)

    def _written(self, name: str, number: float | Decimal) -> str | None:
        """Return the number as text; parquet may yield ``Decimal``."""
        if isinstance(number, int):  # may be larger than any float
            return str(number)
        if not math.isfinite(number):
            self._fault(name, f"must be a text or a finite number, got {kind_of(number)}")
            return None
        return f"{number:f}" if isinstance(number, Decimal) else str(number)

    def id(self, name: str) -> str | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            self._fault(name, f"must be a text or a whole number, got {kind_of(value)}")
            return None
        return str(value) if not isinstance(value, str) or self._is_text(name, value) else None

    def subset(self, name: str) -> str | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, (dict, list)):
            self._fault(name, f"must be a text, a number or a boolean to split evaluations by, got {kind_of(value)}")
            return None
        return str(value) if not isinstance(value, str) or self._is_text(name, value) else None

    def _is_text(self, name: str, value: str) -> bool:
        if not value.strip():
            self._fault(name, "is empty")
            return False
        fault = unicode_fault(value)
        if fault is None and "\0" in value:  # indicates a damaged file or another encoding
            fault = f"has a NUL character at position {value.index(chr(0))}"
        if fault is not None:
            self._fault(name, fault)
        return fault is None


_GENERATION_ERRORS = (ArithmeticError, AssertionError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)


def _procedural(source: ReasoningGymSource, faults: Faults) -> Iterator[Problem]:
    """Yield the problems of a reasoning-gym task; ``metadata`` holds the input of the task's scorer (see ``rewards.procedural``)."""
    from reasoning_gym.factory import DATASETS, create_dataset

    place = f"reasoning_gym task {source.task!r}"
    if source.task not in DATASETS:
        near = difflib.get_close_matches(source.task, DATASETS, n=3)
        faults.add(place, None, None, f"no such task{'; did you mean ' + ' or '.join(map(repr, near)) + '?' if near else ''}")
        return
    fixed = sorted({"size", "seed"} & source.options.keys())
    if fixed:
        faults.add(place, None, "options", f"{' and '.join(fixed)}: set next to 'task', not inside 'options'")
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
        # Tasks with many right answers give none; their scorer uses the entry's metadata.
        answer = "" if entry["answer"] is None else str(entry["answer"])
        metadata = {"task": source.task, "options": source.options, "question": question, "entry_metadata": entry["metadata"]}
        yield Problem(f"{source.name}/{number}", question, answer, source.name, "reasoning_gym", metadata, place, number)
