"""``vapo-mcore data check``: report rows, columns, lengths, repeats, overlaps and faults of data files before a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from vapo_mcore.config.schema import DataConfig, FileSource, Source
from vapo_mcore.data.faults import Fault, Faults
from vapo_mcore.data.prompts import Tokenizer, encode_prompts, prompt_key
from vapo_mcore.data.readers import read_rows
from vapo_mcore.data.sources import Problem, read_source

_EXAMPLES = 5


@dataclass(frozen=True)
class Spread:
    """Statistics of lengths."""

    mean: float
    median: float
    p90: float
    p99: float
    max: int


@dataclass
class SourceReport:
    """Report on one source.

    Attributes:
        name, place: name of the source, and its file or task.
        rows, usable: rows read, and rows without a fault.
        faults: all faults, in row order.
        schema: detected columns of prompt and answer (None: no columns).
        fields: column -> kind of value -> number of rows.
        characters, tokens: lengths of the usable prompts; tokens include the template and are None without a tokenizer.
        overlong: prompts of more than ``max_prompt_length`` tokens; None without a tokenizer. They are faults unless they are dropped.
        overlong_rows: the first few of them, as (row, tokens).
        repeated, contradicting: usable prompts that repeat an earlier prompt, and those among them with a different answer.
        repeated_rows: the first few of them, as (row, earlier row).
        answers: number of distinct answers.
    """

    name: str
    place: str
    rows: int = 0
    usable: int = 0
    faults: list[Fault] = field(default_factory=list)
    schema: str | None = None
    fields: dict[str, dict[str, int]] = field(default_factory=dict)
    characters: Spread | None = None
    tokens: Spread | None = None
    overlong: int | None = None
    overlong_rows: list[tuple[int, int]] = field(default_factory=list)
    repeated: int = 0
    contradicting: int = 0
    repeated_rows: list[tuple[int, int]] = field(default_factory=list)
    answers: int = 0


@dataclass(frozen=True)
class Overlap:
    """Prompts shared by an evaluation set and a training source; ``rows``: the first few, as (evaluation row, training row)."""

    evaluation: str
    training: str
    common: int
    prompts: int
    rows: list[tuple[int, int]]


@dataclass(frozen=True)
class DataReport:
    """Report on all sources."""

    train: list[SourceReport]
    eval: list[SourceReport]
    overlaps: list[Overlap]

    @property
    def faults(self) -> int:
        return sum(len(report.faults) for report in (*self.train, *self.eval))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


TruthFaults = Callable[[Sequence[tuple[str, str, dict[str, Any]]]], Sequence[str | None]]
"""Function that returns, for each (verifier, ground truth, metadata), why the verifier cannot read the ground truth; None if it can."""


def check_data(data: DataConfig, tokenizer: Tokenizer | None, truth_faults: TruthFaults | None = None) -> DataReport:
    """Read all sources and report on them. Bad data is reported, never raised.

    With ``truth_faults``, rows whose ground truth the verifier cannot read are bad rows.
    """
    splits: dict[str, list[SourceReport]] = {}
    firsts: dict[str, dict[str, dict[bytes, int]]] = {}
    for split, sources in (("train", data.train), ("eval", data.eval)):
        splits[split], firsts[split] = [], {}
        for source in sources:
            report, rows = _source_report(source, data, tokenizer, truth_faults)
            splits[split].append(report)
            firsts[split][source.name] = rows
    overlaps = []
    for name, keys in firsts["eval"].items():
        for other, others in firsts["train"].items():
            common = [(row, others[key]) for key, row in keys.items() if key in others]
            if common:
                overlaps.append(Overlap(name, other, len(common), len(keys), common[:_EXAMPLES]))
    return DataReport(splits["train"], splits["eval"], overlaps)


def _source_report(
    source: Source, data: DataConfig, tokenizer: Tokenizer | None, truth_faults: TruthFaults | None
) -> tuple[SourceReport, dict[bytes, int]]:
    """Return the report, and the first row of each distinct prompt."""
    faults = Faults(kept=None)
    problems = read_source(source, data, faults)
    place = source.path if isinstance(source, FileSource) else next(iter((*faults.rows, *faults.count)), source.name)
    report = SourceReport(source.name, place, rows=faults.rows.get(place, 0))
    if tokenizer is not None:
        problems = _measure_tokens(report, problems, data, tokenizer, faults)
    if truth_faults is not None:
        problems = _readable(problems, truth_faults, faults)
    schema = faults.schemas.get(place)
    if isinstance(source, FileSource) and schema is not None:
        marker = f" after {schema.marker!r}" if schema.marker else ""
        report.schema = f"{schema.name}: prompt = {schema.prompt}, answer = {schema.answer}{marker}"
        report.fields = _fields(row for _, row in read_rows(source.path, Faults(rows={source.path: 0})))
    report.faults = sorted(faults.found, key=lambda fault: fault.row or 0)
    report.usable = len(problems)
    report.characters = _spread([_characters(problem) for problem in problems])
    report.answers = len({problem.ground_truth for problem in problems})
    return report, _repeats(report, problems)


def _readable(problems: list[Problem], truth_faults: TruthFaults, faults: Faults) -> list[Problem]:
    """Return the problems whose ground truth their verifier can parse."""
    reasons = truth_faults([(problem.verifier, problem.ground_truth, problem.metadata) for problem in problems])
    for problem, reason in zip(problems, reasons, strict=True):
        if reason is not None:
            faults.add(problem.file, problem.row, None, reason)
    return [problem for problem, reason in zip(problems, reasons, strict=True) if reason is None]


def _measure_tokens(report: SourceReport, problems: list[Problem], data: DataConfig, tokenizer: Tokenizer, faults: Faults) -> list[Problem]:
    encoded = list(encode_prompts(problems, data, tokenizer, faults))
    lengths = [len(token_ids) for _, _, token_ids in encoded]
    report.tokens = _spread(lengths)
    overlong = [(problem.row, len(token_ids)) for problem, _, token_ids in encoded if len(token_ids) > data.max_prompt_length]
    report.overlong, report.overlong_rows = len(overlong), overlong[:_EXAMPLES]
    return [problem for problem, _, token_ids in encoded if 0 < len(token_ids) <= data.max_prompt_length]


def _repeats(report: SourceReport, problems: Sequence[Problem]) -> dict[bytes, int]:
    firsts: dict[bytes, Problem] = {}
    for problem in problems:
        earlier = firsts.setdefault(prompt_key(problem.prompt), problem)
        if earlier is problem:
            continue
        report.repeated += 1
        report.contradicting += earlier.ground_truth.strip() != problem.ground_truth.strip()
        if len(report.repeated_rows) < _EXAMPLES:
            report.repeated_rows.append((problem.row, earlier.row))
    return {key: problem.row for key, problem in firsts.items()}


def _fields(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for name, value in row.items():
            counts.setdefault(str(name), Counter())[_KINDS.get(type(value), type(value).__name__)] += 1
    return {name: dict(kinds.most_common()) for name, kinds in counts.items()}


_KINDS = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number", type(None): "null"}


def _characters(problem: Problem) -> int:
    if isinstance(problem.prompt, str):
        return len(problem.prompt)
    return sum(len(message["content"]) for message in problem.prompt)


def _spread(lengths: Sequence[int]) -> Spread | None:
    if not lengths:
        return None
    median, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return Spread(float(np.mean(lengths)), median, p90, p99, max(lengths))


def render(report: DataReport, max_prompt_length: int | None, shown_faults: int | None) -> str:
    """Render the report as text, with the first ``shown_faults`` faults of each source (None: all)."""
    lines: list[str] = []
    for split, sources in (("train", report.train), ("eval", report.eval)):
        for source in sources:
            lines += [*_source_lines(split, source, max_prompt_length, shown_faults), ""]
    for overlap in report.overlaps:
        rows = ", ".join(f"{one} = {other}" for one, other in overlap.rows)
        more = ", ..." if overlap.common > len(overlap.rows) else ""
        lines.append(
            f"overlap: {overlap.common} of the {overlap.prompts} distinct prompts of the evaluation set {overlap.evaluation!r} are in the "
            f"training source {overlap.training!r} (rows {rows}{more})"
        )
    if report.train and report.eval and not report.overlaps:
        lines.append("overlap: no prompt of an evaluation set is in a training source")
    total = sum(source.rows for source in chain(report.train, report.eval))
    lines.append(f"{total:,} rows, {report.faults:,} faults")
    return "\n".join(lines)


def _source_lines(split: str, source: SourceReport, limit: int | None, shown: int | None) -> list[str]:
    lines = [f"{split} {source.name!r}: {source.place}: {source.rows:,} rows, {source.usable:,} usable"]
    if source.schema is not None:
        lines.append(f"  columns read as {source.schema}")
    for name, kinds in source.fields.items():
        lines.append(f"  field {name!r}: {', '.join(f'{kind} {count:,}' for kind, count in kinds.items())}")
    for what, spread in (("characters", source.characters), ("tokens", source.tokens)):
        if spread is not None:
            high = f"90 % {spread.p90:g}, 99 % {spread.p99:g}, max {spread.max:,}"
            lines.append(f"  prompt {what}: mean {spread.mean:.1f}, median {spread.median:g}, {high}")
    if source.overlong is not None and limit is not None:
        rows = ", ".join(f"row {row}: {tokens:,}" for row, tokens in source.overlong_rows)
        detail = f" ({rows}{', ...' if source.overlong > _EXAMPLES else ''})" if source.overlong else ""
        lines.append(f"  prompts of more than {limit:,} tokens: {source.overlong:,}{detail}")
    lines.append(f"  distinct answers: {source.answers:,}")
    rows = ", ".join(f"{row} = {earlier}" for row, earlier in source.repeated_rows)
    detail = f", {source.contradicting:,} of them with a different answer (rows {rows}{', ...' if source.repeated > _EXAMPLES else ''})"
    lines.append(f"  prompts that repeat an earlier one: {source.repeated:,}{detail if source.repeated else ''}")
    for fault in source.faults if shown is None else source.faults[:shown]:
        place = ("file" if fault.row is None else f"row {fault.row}") + (f", field {fault.field!r}" if fault.field else "")
        lines.append(f"  {place}: {fault.reason}")
    if shown is not None and len(source.faults) > shown:
        lines.append(f"  ... and {len(source.faults) - shown:,} more faults (--all shows them)")
    return lines
