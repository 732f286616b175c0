"""Plot a run's reward, accuracy and held-out evaluation from its metrics.jsonl, or compare the evaluations of several runs.

    python tools/plot_run.py runs/quickstart --output curve.png
    python tools/plot_run.py runs/plain_1 runs/plain_2 runs/segments_1 runs/segments_2 --output curves.png

One run: on the left mean reward and accuracy of the training rollouts, with a running mean; on the right each evaluation set with its 95 %
interval. Several runs: the evaluations by sampled response tokens and by seconds of the steps. Runs whose names differ in a trailing
number (seeds) have one color and one entry of the legend.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import run

from vapo_mcore.errors import DataError
from vapo_mcore.metrics_file import metric_rows
from vapo_mcore.report.series import Point, evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUNNING_MEAN_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the curves of a run, or of several runs together, as a PNG.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="run directory, or its metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--title", help="default: the name of the run directory")
    args = parser.parse_args()
    paths = [run if run.is_file() else run / "metrics.jsonl" for run in args.runs]
    names = [path.resolve().parent.name for path in paths]
    if len(paths) == 1:
        draw(read_rows(paths[0]), args.output, args.title or names[0])
    else:
        draw_several([(name, read_rows(path)) for name, path in zip(names, paths, strict=True)], args.output, args.title)
    print(f"wrote {args.output}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the RL rows of a metrics.jsonl. Raises DataError for a damaged row, with its line, or if there is no RL row."""
    rows = [row for row in metric_rows(path) if row.get("stage", "rl") == "rl"]
    if not rows:
        raise DataError(f"{path} has no row of the rl stage; there is nothing to draw yet")
    return rows


def series(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the rows in which ``key`` exists and is not null."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], width: int = RUNNING_MEAN_STEPS) -> list[float]:
    """Return the mean of each value and up to ``width - 1`` values before it."""
    return [sum(values[max(0, end - width) : end]) / min(width, end) for end in range(1, len(values) + 1)]


def draw(rows: Sequence[dict[str, Any]], output: Path, title: str) -> None:
    """Write the figure to ``output`` as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evaluated = evaluations(rows)
    figure, axes = pyplot.subplots(1, 2 if evaluated else 1, figsize=(11 if evaluated else 6, 4), squeeze=False, layout="constrained")
    _draw_training(axes[0][0], rows)
    if evaluated:
        _draw_evaluations(axes[0][1], evaluated)
    figure.suptitle(title)
    save_figure(figure, output)


def draw_several(runs: Sequence[tuple[str, Sequence[dict[str, Any]]]], output: Path, title: str | None) -> None:
    """Write the evaluations of ``runs`` (names and rows) to ``output`` as a PNG. Raises DataError for one without evaluations or costs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), squeeze=False, sharey=True, layout="constrained")
    colors: dict[str, str] = {}
    for name, rows in runs:
        evaluated = evaluations(rows)
        if not evaluated:
            raise DataError(f"run {name} has no evaluation; runs are compared by their evaluations")
        for label, points in evaluated.items():
            entry = (re.sub(r"[_-]?\d+$", "", name) or name) + (f", {label}" if len(evaluated) > 1 else "")
            known = entry in colors
            color = colors.setdefault(entry, f"C{len(colors)}")
            for axis, key, unit in ((axes[0][0], "sampling/tokens", 1e3), (axes[0][1], "time/step", 1.0)):
                spent = cumulative(name, rows, key)
                x, y = [spent[point.step] / unit for point in points], [point.accuracy for point in points]
                axis.plot(x, y, marker=".", color=color, label="_" if known else entry)
    axes[0][0].set(xlabel="thousand response tokens sampled", ylabel="held-out accuracy", ylim=(0, 1))
    axes[0][1].set(xlabel="seconds of the steps")
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    axes[0][0].legend(loc="best")
    if title is not None:
        figure.suptitle(title)
    save_figure(figure, output)


def cumulative(name: str, rows: Sequence[dict[str, Any]], key: str) -> dict[int, float]:
    """Return the sum of ``key`` up to each step; nothing is spent before step 1. Raises DataError for a step without a value."""
    total, sums = 0.0, {}
    for row in rows:
        if row["step"] > 0:
            if row.get(key) is None:
                raise DataError(f"run {name} has no {key} in step {row['step']}; runs are compared by what they spent")
            total += row[key]
        sums[row["step"]] = total
    return sums


def save_figure(figure: Figure, output: Path) -> None:
    """Write a figure as a PNG, with its folder, and close it."""
    from matplotlib import pyplot

    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png", dpi=120)
    pyplot.close(figure)


def _draw_training(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for key, label, color in (("reward/mean", "mean reward", "tab:blue"), ("accuracy/mean", "accuracy", "tab:orange")):
        steps, values = series(rows, key)
        axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axis.plot(steps, running_mean(values), color=color, label=f"{label} (mean of {RUNNING_MEAN_STEPS} steps)")
    axis.set(xlabel="step", title="training rollouts")
    axis.grid(alpha=0.3)
    axis.legend()


def _draw_evaluations(axis: Axes, evaluated: dict[str, list[Point]]) -> None:
    for label, points in evaluated.items():
        steps, accuracy = [point.step for point in points], [point.accuracy for point in points]
        (line,) = axis.plot(steps, accuracy, marker="o", label=label)
        axis.fill_between(steps, [point.low for point in points], [point.high for point in points], color=line.get_color(), alpha=0.2)
    axis.set(xlabel="step", ylabel="accuracy", ylim=(0, 1), title="held-out evaluation, 95 % interval")
    axis.grid(alpha=0.3)
    axis.legend(loc="best")


if __name__ == "__main__":
    run(main)
