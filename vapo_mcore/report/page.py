"""Build the page: one HTML file with data (as JSON), style and scripts inside."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from vapo_mcore import __version__
from vapo_mcore.config.yaml_text import shown
from vapo_mcore.report import charts, notes, samples, series
from vapo_mcore.report.read import RunData, number_setting

SCRIPTS = ("draw.js", "samples.js", "charts.js", "page.js")  # one scope, in this order


def build_page(runs: Sequence[RunData], title: str) -> str:
    """Return the HTML text, which loads no other resources."""
    template = Template(asset("page.html"))
    return template.substitute(
        title=escape(title),
        version=escape(__version__),
        style=asset("page.css"),
        failures=asset("failures.js"),
        data=embedded(page_data(runs, title)),
        script="\n".join(asset(name) for name in SCRIPTS),
    )


def embedded(data: Any) -> str:
    """Encode data as JSON for a script element. Escapes ``<``, so that no response can close the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates get the same escape as in JSON


def page_data(runs: Sequence[RunData], title: str) -> dict[str, Any]:
    """Collect everything that the scripts draw, as plain values."""
    curves = [series.curves(run.rows) for run in runs]
    recorded = {name for found in curves for name in found["mean"]}
    return {
        "title": title,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "points": series.MOST_POINTS,
        "sections": charts.sections(recorded),
        "runs": [_run_data(run, found, len(runs)) for run, found in zip(runs, curves, strict=True)],
        "differences": notes.differences(runs),
    }


def _run_data(run: RunData, curves: dict[str, Any], runs: int) -> dict[str, Any]:
    read, total = run.sample_files
    return {
        "name": run.name,
        "path": str(run.path),
        "summary": notes.summary(run),
        "diagnosis": notes.diagnosis(run),
        "missing": notes.missing(run, charts.titles_and_metrics()),
        "settings": [[key, shown(value)] for key, value in series.flat(run.settings).items()],
        "curves": curves,
        "evaluations": series.evaluation_curves(run.rows),
        "windows": series.windows(run.rows),
        "longest": number_setting(run.settings, "rollout", "max_response_length"),
        "phases": {name: series.rounded(seconds) for name, seconds in series.phase_seconds(run.rows).items()},
        "samples": {**samples.chosen_samples(run, runs), "files": [read, total]},
    }


def asset(name: str) -> str:
    """Return the text of a file of ``report/assets``."""
    return files("vapo_mcore.report").joinpath("assets", name).read_text(encoding="utf-8")
