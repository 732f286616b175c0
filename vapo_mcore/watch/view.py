"""Render a ``RunState`` as a frame in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vapo_mcore.metrics_file import STAGES, finite_number
from vapo_mcore.watch.state import RunState, duration, last_evaluation

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*%#"
"""For terminals that are not UTF-8."""
_WIDTH = 40  # steps in a sparkline
_FEWEST = 8  # steps in a sparkline on a narrow terminal
_BESIDE = 40  # columns left of the sparkline: the metric's name and last value
_FAULTS = 4
_RANKS = 8
_CHECKPOINTS = 3
_COLOURS = {"running": "green", "finished": "blue", "stopped": "yellow", "hung": "red", "stale": "red"}
_METRICS = (
    "reward/mean",
    "accuracy/mean",
    "response/length_mean",
    "response/truncated_frac",
    "policy/entropy",
    "policy/approx_kl",
    "policy/clip_frac_high",
    "policy/grad_norm",
    "critic/loss",
    "critic/explained_variance_mc",
    "mismatch/logprob_abs_mean",
    "tokens/per_second",
    "time/step",
)
_COUNTERS = (
    ("policy/updates_skipped", "policy updates skipped"),
    ("critic/updates_skipped", "critic updates skipped"),
    ("grading/failed", "responses without a verdict"),
    ("grading/restarts", "graders replaced"),
    ("sampling/engine_rebuilds", "rollout engines rebuilt"),
)


def render(state: RunState, now: float, bars: str = BARS, width: int = 120) -> RenderableType:
    """Render the frame at wall-clock time ``now``; ``width``: columns of the terminal; a narrow one shows fewer steps."""
    parts: list[RenderableType] = [_head(state)]
    parts += [Text(fault, style="red") for fault in state.faults[:_FAULTS]]
    if len(state.faults) > _FAULTS:
        parts.append(Text(f"... and {len(state.faults) - _FAULTS} more", style="red"))
    if state.ranks and state.status in ("running", "hung", "stale"):
        parts.append(_ranks(state, now))
    steps = state.steps(state.stage)
    parts.append(_metrics(state.stage, steps, bars, max(_FEWEST, min(_WIDTH, width - _BESIDE))) if steps else Text("no step is done yet"))
    parts += _evaluation(state)
    parts += _checkpoints(state, now)
    parts += _notes(state)
    parts.append(Text(_counters(state)))
    return Group(*parts)


def _head(state: RunState) -> Text:
    line = Text(f"{state.path}  ")
    line.append(state.status, style=f"bold {_COLOURS[state.status]}")
    line.append(f" ({state.reason})\n")
    made = {stage: state.steps(stage) for stage in STAGES}
    parts = []
    for stage, label in zip(STAGES, ("value pretraining", "step"), strict=True):
        if made[stage] or (stage == state.stage and state.totals.get(stage)):
            number = made[stage][-1]["step"] if made[stage] else 0
            parts.append(f"{label} {number}/{state.totals.get(stage, '?')}")
    left = state.seconds_left()
    if left is not None and state.status == "running":
        parts.append(f"{duration(left)} left, without evaluations")
    line.append("  ".join(parts))
    return line


def _ranks(state: RunState, now: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "host", "step", "phase", "for", "last progress"):
        table.add_column(name)
    for rank in state.ranks[:_RANKS]:
        since, last = duration(now - rank.since), f"{duration(now - rank.last)} ago"
        table.add_row(str(rank.rank), *(Text(cell) for cell in (rank.host, rank.step or "-", rank.phase)), since, last)
    if len(state.ranks) > _RANKS:
        table.add_row("...", f"{len(state.ranks) - _RANKS} more")
    return table


def _metrics(stage: str, steps: Sequence[dict[str, object]], bars: str, count: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column(f"last {min(len(steps), count)} steps" + ("" if stage == "rl" else " of value pretraining"), min_width=_FEWEST)
    for name in _METRICS:
        if name in steps[-1]:
            values = [finite_number(row.get(name)) for row in steps[-count:]]
            table.add_row(name, _shown(values[-1]), Text(sparkline(values, bars), no_wrap=True, overflow="crop"))
    return table


def sparkline(values: Sequence[float | None], bars: str = BARS) -> str:
    """Draw one bar per value, scaled between minimum and maximum; blank for None, mid-height if all are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    if high == low:
        return "".join(" " if value is None else bars[len(bars) // 2] for value in values)
    top = len(bars) - 1
    return "".join(" " if value is None else bars[round((value - low) / (high - low) * top)] for value in values)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _evaluation(state: RunState) -> list[RenderableType]:
    found = last_evaluation(state.rows)
    if found is None:
        return []
    step, values = found
    parts = []
    for name, value in values.items():
        prefix, _, score = name.rpartition("/")
        if score.startswith("avg@"):
            low, high = (_shown(finite_number(values.get(f"{prefix}/{end}"))) for end in ("ci_low", "ci_high"))
            parts.append(f"{prefix.removeprefix('eval/')} {score} {_shown(finite_number(value))} [{low}, {high}]")
    return [Text(f"evaluation after step {step}: {'; '.join(parts)}")]


def _checkpoints(state: RunState, now: float) -> list[RenderableType]:
    shown = []
    for path in state.checkpoints[-_CHECKPOINTS:]:
        try:
            shown.append(f"{path.name} ({duration(now - path.stat().st_mtime)} ago)")
        except OSError:
            continue  # deleted meanwhile
    return [Text(f"checkpoints: {', '.join(shown) or 'none yet'}")]


def _notes(state: RunState) -> list[RenderableType]:
    notes: list[RenderableType] = [Text(f"diagnosis: {finding}", style="yellow") for finding in state.findings]
    now = {finding.name for finding in state.findings}
    past = [f"{name} in {count} steps" for name, count in sorted(state.counts.items()) if name not in now]
    return notes + ([Text(f"diagnosis, earlier: {', '.join(past)}")] if past else [])


def _counters(state: RunState) -> str:
    counts = [(label, sum(int(row.get(name) or 0) for row in state.rows)) for name, label in _COUNTERS]
    counts.append(("trackers failed", int(state.rows[-1].get("trackers/failed") or 0) if state.rows else 0))
    counts.append(("rows with numbers that are not finite", sum("metrics/nonfinite" in row for row in state.rows)))
    shown = [f"{label} {count}" for label, count in counts if count]
    return f"faults: {', '.join(shown)}" if shown else "faults: none"
