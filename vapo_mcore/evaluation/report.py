"""Write an evaluation as ``results.json`` and ``results.md``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vapo_mcore.errors import RecordError
from vapo_mcore.evaluation.intervals import Estimate
from vapo_mcore.evaluation.statistics import Summary

JSON_NAME, MARKDOWN_NAME = "results.json", "results.md"


def write_report(
    folder: Path,
    name: str,
    title: str,
    settings: Mapping[str, Any],
    summaries: Sequence[Summary],
    seconds: Mapping[str, float],
    *,
    processes: int,
) -> None:
    """Write ``<name>.json`` and ``<name>.md``. Everything except ``timing`` depends only on the responses.

    ``processes``: number of processes (one per GPU) that ran for ``seconds``. Raises RecordError if the files cannot be written.
    """
    results = {
        "settings": dict(settings),
        "sets": {summary.name: _plain(summary) for summary in summaries},
        "timing": _timing(summaries, seconds, processes),
    }
    _replace(folder / f"{name}.json", json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _replace(folder / f"{name}.md", markdown(title, settings, summaries, seconds, processes=processes))


def markdown(title: str, settings: Mapping[str, Any], summaries: Sequence[Summary], seconds: Mapping[str, float], *, processes: int) -> str:
    """Render the report: tables of scores and lengths, one for each field that splits a set, and the time taken."""
    lines = [f"# {title}", "", ", ".join(f"{key} {_cell(value)}" for key, value in settings.items()), ""]
    lines += ["## Scores", "", *_score_table("set", summaries), ""]
    lines += [
        "Means over problems, with 95 % intervals over problems: bootstrap, or Wilson's (marked w) where all problems score the same.",
        "pass@k is the unbiased estimate; in maj@k all correct responses are one vote, and a tie counts as its expectation. `-`: not",
        "defined. `failed`: responses without a verdict, by cause, which enter no score.",
        "",
        "## Lengths",
        "",
        *_length_table(summaries),
        "",
    ]
    for summary in summaries:
        for field, parts in summary.parts.items():
            lines += [f"## {_cell(summary.name)} by {_cell(field)}", "", *_score_table(field, parts), "", *_length_table(parts), ""]
    timing = _timing(summaries, seconds, processes)
    lines += [
        "## Time",
        "",
        f"{timing['seconds']:.1f} s in all ({timing['gpu_hours']:.3f} GPU-hours of {processes} processes), "
        f"{timing['generate_seconds']:.1f} s of it generation and {timing['reward_seconds']:.1f} s grading; "
        f"{timing['response_tokens']:,} response tokens, {timing['response_tokens_per_second']:.0f} a second of generation.",
        "",
    ]
    return "\n".join(lines)


def console_lines(summaries: Sequence[Summary]) -> list[str]:
    """Return one line per set."""
    lines = []
    for summary in summaries:
        scores = "; ".join(f"{name} {describe(value)}" for name, value in summary.scores.items())
        tail = f"; {summary.failed} responses without a verdict ({_causes(summary)})" if summary.failed else ""
        length = f"mean length {summary.lengths.mean:.0f}, {summary.truncated:.1%} truncated"
        lines.append(f"{summary.name}: {scores} ({summary.problems} problems); {length}{tail}")
    return lines


def _plain(summary: Summary) -> dict[str, Any]:
    plain = asdict(summary)
    del plain["name"]
    plain["parts"] = {field: {part.name: _plain(part) for part in parts} for field, parts in summary.parts.items()}
    return plain


def _timing(summaries: Sequence[Summary], seconds: Mapping[str, float], processes: int) -> dict[str, float | int]:
    tokens, generation = sum(summary.response_tokens for summary in summaries), seconds.get("generate", 0.0)
    return {
        "seconds": seconds.get("total", 0.0),
        "gpu_hours": seconds.get("total", 0.0) * processes / 3600,
        "generate_seconds": generation,
        "reward_seconds": seconds.get("reward", 0.0),
        "response_tokens": tokens,
        "prompt_tokens": sum(summary.prompt_tokens for summary in summaries),
        "response_tokens_per_second": tokens / generation if generation else 0.0,
    }


def _score_table(first: str, summaries: Sequence[Summary]) -> list[str]:
    names = list(dict.fromkeys(name for summary in summaries for name in summary.scores))
    lines = [_row(first, "problems", *names, "failed"), _row(*["---"] * (len(names) + 3))]
    for summary in summaries:
        lines.append(_row(summary.name, summary.problems, *(describe(summary.scores.get(name)) for name in names), _failed(summary)))
    return lines


def _causes(summary: Summary) -> str:
    return ", ".join(f"{cause} {count}" for cause, count in summary.causes.items())


def _failed(summary: Summary) -> str:
    return f"{summary.failed} ({_causes(summary)})" if summary.failed else "0"


def _length_table(summaries: Sequence[Summary]) -> list[str]:
    columns = ("", "responses", "mean", "median", "90 %", "max", "mean if right", "mean if wrong", "truncated", "tokens")
    lines = [_row(*columns), _row(*["---"] * len(columns))]
    for summary in summaries:
        n = summary.lengths
        right, wrong = ("-" if mean is None else f"{mean:.1f}" for mean in (n.right, n.wrong))
        numbers = (f"{n.mean:.1f}", f"{n.median:g}", f"{n.p90:g}", n.max, right, wrong, f"{summary.truncated:.1%}", summary.response_tokens)
        lines.append(_row(summary.name, summary.responses, *numbers))
    return lines


def describe(value: Estimate | None) -> str:
    """Format as ``0.500 [0.250, 0.750]``, with a w after Wilson's interval; a dash if undefined."""
    if value is None:
        return "-"
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]{'w' if value.interval == 'wilson' else ''}"


def _row(*cells: object) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", r"\|").split())


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="surrogatepass")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error
