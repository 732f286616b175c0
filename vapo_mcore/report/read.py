"""Read a run directory for the report: metric rows, configuration and samples. Read-only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_mcore.config.yaml_text import parse_yaml
from vapo_mcore.errors import ConfigError, DataError, VapoError
from vapo_mcore.metrics_file import GrowingMetrics, Row, is_count, is_number

Sample = dict[str, Any]

MOST_SAMPLE_FILES = 200
"""Maximum number of sample files read per run. Of more files, this many are chosen evenly, including the first and the last."""

_TEXTS = ("prompt_id", "source", "prompt", "response", "finish_reason")
_TEXTS_OR_NULL = ("error", "answer", "ground_truth")
_NUMBERS_OR_NULL = ("reward", "score")
_COUNTS = ("sample_index", "response_length")


@dataclass(frozen=True)
class RunData:
    """Contents of a run directory.

    Attributes:
        name: unique name of the run on the page.
        rows: rows of metrics.jsonl, in order.
        settings: contents of config.yaml; {} if it is missing or unreadable.
        finished: whether the run is finished.
        samples: samples of the newest stage, oldest first, each with ``step`` and ``stage``.
        sample_files: number of files read, and number of files in total.
        evaluated: samples of the first and the last evaluation, by step.
        settings_fault: why there are no settings.
    """

    name: str
    path: Path
    rows: list[Row]
    settings: dict[str, Any]
    finished: bool
    samples: list[Sample]
    sample_files: tuple[int, int]
    evaluated: dict[int, list[Sample]]
    settings_fault: str | None = None


def read_runs(paths: Sequence[str | Path]) -> list[RunData]:
    """Read the runs in the given order. Raises one DataError for all unreadable runs, ConfigError for a run given twice."""
    folders = [Path(path) for path in paths]
    resolved = [folder.resolve() for folder in folders]
    twice = sorted({str(folder) for folder, own in zip(folders, resolved, strict=True) if resolved.count(own) > 1})
    if twice:
        raise ConfigError(f"given more than once: {', '.join(twice)}")
    runs, faults = [], []
    for folder, name in zip(folders, _names(resolved), strict=True):
        try:
            runs.append(_read_run(folder, name))
        except VapoError as error:
            faults.append(str(error))
    if faults:
        raise DataError("\n".join(faults))
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the runs."""
    parts = 1
    while True:
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        parts += 1


def _read_run(folder: Path, name: str) -> RunData:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a run directory: the folder does not exist; give the run.dir of a run")
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{folder} is not a run directory: it has no metrics.jsonl; give the run.dir of a run")
    metrics = GrowingMetrics(folder / "metrics.jsonl")
    metrics.refresh()
    rows = metrics.rows
    if all(row["step"] == 0 for row in rows):
        raise DataError(f"{folder / 'metrics.jsonl'} has no row of a step yet: the run has not completed a step")
    stage = "rl" if any(row.get("stage", "rl") == "rl" and row["step"] > 0 for row in rows) else "value_pretraining"
    files = _by_step(folder / "samples", "step" if stage == "rl" else "value_pretraining")
    chosen = evenly(files, MOST_SAMPLE_FILES)
    samples = [sample | {"step": step, "stage": stage} for step, file in chosen for sample in _read_samples(file)]
    evaluations = _by_step(folder / "samples", "eval_step")
    ends = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else []
    evaluated = {step: _read_samples(file) for step, file in ends}
    finished = (folder / "finished.json").is_file()
    settings, fault = _settings(folder / "config.yaml")
    return RunData(name, folder, rows, settings, finished, samples, (len(chosen), len(files)), evaluated, fault)


def _read_samples(path: Path) -> list[Sample]:
    """Read the samples of a file, except an incomplete last line. Raises DataError, with the line number, for a damaged line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines[:-1], 1):  # a complete line ends with a line break
        try:
            sample = json.loads(line, parse_constant=_undefined)
        except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError, or deeply nested lists
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(sample, dict) or "prompt_id" not in sample or "correct" not in sample:
            raise DataError(f"{path}, line {number}: expected an object with 'prompt_id' and 'correct'")
        faults = sample_faults(sample)
        if faults:
            raise DataError(f"{path}, line {number}: {'; '.join(faults)}")
        found.append(sample)
    return found


def _undefined(_: str) -> None:
    """Convert NaN and Infinity, which a diverged run writes for values and log-probs, to null."""


def sample_faults(sample: Sample) -> list[str]:
    """Return errors in the fields of a sample that the page reads."""
    faults = [f"{name!r} is not text" for name in _TEXTS if not isinstance(sample.get(name, ""), str)]
    faults += [f"{name!r} is neither text nor null" for name in _TEXTS_OR_NULL if not isinstance(sample.get(name), str | None)]
    faults += [f"{name!r} is neither a number nor null" for name in _NUMBERS_OR_NULL if not _is_number_or_null(sample.get(name))]
    faults += [f"{name!r} is not a whole number from 0 to 2**31 - 1" for name in _COUNTS if not is_count(sample.get(name, 0))]
    if not isinstance(sample["correct"], bool):
        faults.append("'correct' is neither true nor false")
    if "segments" in sample and not _are_segments(sample["segments"]):
        faults.append("'segments' is not a list of pairs of whole numbers")
    return faults + _token_faults(sample.get("tokens"))


def _are_segments(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(part, list) and len(part) == 2 and all(map(is_count, part)) for part in value)


def _token_faults(tokens: Any) -> list[str]:
    if tokens is None or tokens == {}:
        return []
    if not isinstance(tokens, dict) or not all(isinstance(column, list) for column in tokens.values()) or "text" not in tokens:
        return ["'tokens' is not an object of lists that include 'text'"]
    faults = []
    for name, column in tokens.items():
        if not all(isinstance(item, str) if name == "text" else _is_number_or_null(item) for item in column):
            faults.append(f"'tokens.{name}' is not a list of " + ("texts" if name == "text" else "numbers and nulls"))
        if len(column) != len(tokens["text"]):
            faults.append(f"'tokens.{name}' has {len(column)} entries for {len(tokens['text'])} tokens")
    return faults


def _is_number_or_null(value: Any) -> bool:
    return value is None or is_number(value)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` of ``items``, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def _by_step(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """List the files ``<prefix>_<number>.jsonl``, sorted by number."""
    found = []
    for path in folder.glob(f"{prefix}_*.jsonl") if folder.is_dir() else ():
        number = path.stem.removeprefix(f"{prefix}_")
        if number.isdecimal():
            found.append((int(number), path))
    return sorted(found)


def _settings(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read the settings. Returns (settings, None) or ({}, why they cannot be read)."""
    try:
        found, faults = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "the run has no config.yaml"
    except OSError as error:
        return {}, f"config.yaml cannot be read: {error.strerror}"
    except (UnicodeDecodeError, RecursionError) as error:
        return {}, f"config.yaml cannot be read: {error}"
    if faults or not isinstance(found, dict) or not found:
        return {}, f"config.yaml: {'; '.join(faults) or 'expected a mapping of settings'}"
    return found, None


def setting(settings: Mapping[str, Any], *keys: str) -> Any:
    """Return a setting by its keys, or None if it or a section above it is absent."""
    value: Any = settings
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number_setting(settings: Mapping[str, Any], *keys: str) -> int | float | None:
    """Return a setting, or None if it is absent or not a number."""
    value = setting(settings, *keys)
    return value if is_number(value) else None


def text_setting(settings: Mapping[str, Any], *keys: str) -> str | None:
    """Return a setting, or None if it is absent or not text."""
    value = setting(settings, *keys)
    return value if isinstance(value, str) else None


def rows_of(rows: Iterable[Row], stage: str) -> list[Row]:
    """Return the rows of one stage's steps, without evaluations before the first step (``step`` 0)."""
    return [row for row in rows if row.get("stage", "rl") == stage and row["step"] > 0]
