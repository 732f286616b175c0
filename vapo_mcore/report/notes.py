"""Build the top of the page: a summary and the diagnosis of each run, differing settings, and what data is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vapo_mcore.config import load_config
from vapo_mcore.config.yaml_text import shown
from vapo_mcore.diagnosis.monitor import Finding, Monitor
from vapo_mcore.errors import ConfigError
from vapo_mcore.report.read import RunData, number_setting, rows_of, text_setting
from vapo_mcore.report.samples import has_tokens
from vapo_mcore.report.series import evaluations, flat, mean_of_ends, other_bins

ENDS = 10
"""The summary compares the means of this many first and last steps."""
_ALWAYS_DIFFERENT = ("run.dir",)


def summary(run: RunData) -> dict[str, Any]:
    """Return the facts shown on a run's card."""
    steps = rows_of(run.rows, "rl")
    found: dict[str, Any] = {
        "steps": steps[-1]["step"] if steps else 0,
        "planned": number_setting(run.settings, "run", "steps"),
        "pretraining": len(rows_of(run.rows, "value_pretraining")),
        "finished": run.finished,
        "model": text_setting(run.settings, "model", "path"),
        "estimator": text_setting(run.settings, "algorithm", "advantage", "estimator"),
        "ends": {name: mean_of_ends(run.rows, name, ENDS) for name in ("reward/mean", "accuracy/mean", "response/length_mean")},
        "window": min(ENDS, len(steps)),
        "evaluations": {},
    }
    for name, points in evaluations(run.rows).items():
        found["evaluations"][name] = [[point.step, point.accuracy, point.low, point.high] for point in (points[0], points[-1])]
    return found


def diagnosis(run: RunData) -> dict[str, Any]:
    """Apply the diagnosis rules to a run.

    Returns: ``findings``, every rule that held, with the evidence from when it last began to hold; ``failure``, why the rules could not be
        applied, or None.
    """
    if not run.settings:
        return {"findings": [], "failure": f"{run.settings_fault or 'no settings'}; config.yaml holds the thresholds"}
    try:
        monitor = Monitor(load_config(run.path / "config.yaml", check_paths=False))
    except ConfigError as error:
        return {"findings": [], "failure": f"this version cannot read config.yaml: {error}"}
    found: dict[str, dict[str, Any]] = {}
    for row in run.rows:
        for finding in monitor.observe(row):
            _note(found, finding, row)
    return {"findings": list(found.values()), "failure": None}


def _note(found: dict[str, dict[str, Any]], finding: Finding, row: dict[str, Any]) -> None:
    stage = row.get("stage", "rl")
    note = found.setdefault(finding.name, {"rule": finding.name, "means": finding.means, "remedy": finding.remedy, "steps": 0})
    note["steps"] += 1
    note.setdefault("first", [stage, row["step"]])
    note["last"] = [stage, row["step"]]
    if finding.in_a_row == 1:
        note["evidence"] = finding.evidence


def differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return table rows with a setting and its value in each run, for settings that differ."""
    settings = [flat(run.settings) for run in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    table = []
    for key in keys:
        values = [shown(each[key]) if key in each else "-" for each in settings]
        if len(set(values)) > 1 and key not in _ALWAYS_DIFFERENT:
            table.append([key, *values])
    return table


def missing(run: RunData, charts: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return sentences about data that the page cannot show. ``charts``: title and metrics of each chart."""
    recorded = {name for row in run.rows for name in row}
    absent = [title for title, metrics in charts if not any(name in recorded for name in metrics)]
    found = []
    if absent:
        found.append(
            f"No data for: {', '.join(absent)}. A metric is absent if the run does not have it (no critic, no reference, one "
            "source), or if an earlier version, which did not record it, wrote the run."
        )
    differing = sum(map(bool, other_bins(run.rows)))
    if differing:
        found.append(f"Distributions of {differing} steps are omitted: their bins differ from those of the last step.")
    if not evaluations(run.rows):
        found.append("No evaluation (data.eval and eval.* in the configuration).")
    elif len(run.evaluated) < 2:
        found.append("Fewer than two evaluations with responses: changed verdicts cannot be shown.")
    if not run.samples:
        found.append("No sampled responses of training (run.samples_per_step).")
    elif not has_tokens(run.samples):
        found.append("The samples have no per-token values: an earlier version wrote them, or the responses have no verdict.")
    if not run.settings:
        found.append(f"Settings and length bins in tokens are unknown: {run.settings_fault or 'the run has none'}.")
    return found
