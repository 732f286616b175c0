"""Compare algorithms on one recipe: a learning rate for each, chosen on other seeds, then paired differences over seeds.

    python tools/compare.py --output runs/compare --recipe examples/configs/critic_game_vapo.yaml --rates 3e-4 1e-3 3e-3
    python tools/compare.py --output runs/compare --recipe examples/configs/critic_game_vapo.yaml --rates 3e-4 1e-3 3e-3 --report-only

1. Each algorithm runs with each rate on the tuning seeds. The rate with the highest mean accuracy is chosen; of equal ones the lowest.
2. Each algorithm runs with its rate on the other seeds.
3. ``compare.md``, ``compare.json`` and ``compare.png`` (means over seeds) show held-out accuracy at equal samples (all sampled responses
   count, those of value pretraining and of dropped groups too) and at equal seconds (of the steps, evaluations excluded), and the
   differences to the first algorithm, paired by seed, with 95 % intervals (Student's t).

An algorithm is the recipe plus the settings of a preset, without the preset's sizes; NAME=FILE is a recipe of your own. The critic's rate
keeps its ratio to the policy's. Accuracies between two evaluations are interpolated. Finished runs are not repeated, so an interrupted
command can be started again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ablation import EXAMPLES, T_QUANTILES, require_same_settings, train, write_variant
from plot_run import save_figure
from toolkit import run

from vapo_mcore.config import Config, load_config
from vapo_mcore.config.yaml_text import format_yaml, parse_yaml
from vapo_mcore.errors import ConfigError
from vapo_mcore.metrics_file import metric_rows

ALGORITHMS = ("vapo", "vc_ppo", "ppo", "grpo", "dapo", "rloo", "reinforce_pp", "vapo_wo_value_pretraining", "vapo_wo_decoupled_gae")
FEWEST_SEEDS = 5
CURVE_POINTS = 60
SIZES = (("batch",), ("reward", "overlong"), ("policy", "optimizer"), ("extends",))
"""Settings of presets that fit the paper's models and data, not the recipe."""
FIXED = ("run.samples_per_step=0", "run.tensorboard=false", "export.at_end=false", "eval.at_start=true", "eval.at_end=true")


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of a run: responses sampled and seconds spent until then, and held-out accuracy."""

    samples: float
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """One run to make; ``phase``: "tune" or "final"."""

    algorithm: str
    rate: float
    seed: int
    phase: str

    @property
    def name(self) -> str:
        return f"{self.phase} {self.algorithm} rate {self.rate:g} seed {self.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare algorithms at equal samples and equal seconds.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs and the tables")
    parser.add_argument("--recipe", type=Path, required=True, help="base recipe, with the VAPO settings that fit its task")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME[=FILE]", help="the first is the reference")
    parser.add_argument("--rates", type=float, nargs="+", required=True, help="policy learning rates, the same grid for all")
    parser.add_argument("--tuning-seeds", type=int, nargs="+", default=[101, 102], help="default: 101 102")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="default: 1 2 3 4 5")
    parser.add_argument("--samples", type=int, help="responses of a run, value pretraining's included (default: those of the recipe)")
    parser.add_argument("--report-only", action="store_true", help="start no run; write the tables of the finished runs")
    parser.add_argument("--stop-after-minutes", type=float, default=math.inf, help="start no further run after this many minutes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for every run")
    args = parser.parse_args()
    study = Comparison(args.recipe, args.output, args.algorithms, args.rates, args.tuning_seeds, args.seeds, args.samples, args.set)
    if not args.report_only:
        study.run_all(time.monotonic() + 60 * args.stop_after_minutes)
    study.report()


class Comparison:
    """All runs of a comparison in one folder. Checks every configuration before the first run starts."""

    def __init__(
        self,
        recipe: Path,
        output: Path,
        algorithms: Sequence[str],
        rates: Sequence[float],
        tuning_seeds: Sequence[int],
        seeds: Sequence[int],
        samples: int | None,
        settings: Sequence[str],
    ) -> None:
        self.output, self.recipe, self.rates = output, recipe, sorted(rates)
        self.seeds = {"tune": list(tuning_seeds), "final": list(seeds)}
        self.overrides = [*FIXED, *settings]
        self._configs: dict[Run, Config] = {}
        base = load_config(recipe, self.overrides)
        self.samples = samples if samples is not None else base.batch.responses_per_step * (_pretraining(base) + base.run.steps)
        self.files = {name: write_algorithm(name, file, recipe, output / "configs") for name, file in map(_named, algorithms)}
        self._check(len(algorithms), base.batch.responses_per_step)
        self.steps = {name: self._steps(name) for name in self.files}
        for name in self.files:
            for phase in self.seeds:
                for planned in self._planned(name, phase, self.rates):
                    require_same_settings(self.folder(planned), self.config(planned))

    def _check(self, given: int, responses: int) -> None:
        faults = []
        if len(self.files) < given:
            faults.append("--algorithms: names one twice")
        if len(set(self.rates)) < len(self.rates) or not all(rate > 0 for rate in self.rates):
            faults.append(f"--rates: {self.rates} must be different positive numbers")
        final, tuning = self.seeds["final"], self.seeds["tune"]
        if not FEWEST_SEEDS <= len(set(final)) == len(final) <= len(T_QUANTILES) + 1:
            faults.append(f"--seeds: {final} must be {FEWEST_SEEDS} to {len(T_QUANTILES) + 1} different numbers")
        if set(final) & set(tuning) or len(set(tuning)) < len(tuning):
            faults.append(f"--tuning-seeds: {tuning} must be different numbers, none of them in --seeds")
        if self.samples % responses:
            faults.append(f"--samples: {self.samples} is no multiple of the recipe's {responses} responses a step")
        if faults:
            raise ConfigError("\n".join(faults))

    def _steps(self, name: str) -> int:
        """Return the RL steps of an algorithm. One with dynamic sampling may pass the samples before its last step."""
        config = load_config(self.files[name], self.overrides)
        if config.uses_critic and config.critic.value_pretraining.until is not None:
            raise ConfigError(
                f"{name}: critic.value_pretraining.until ends pretraining after a number of rollouts that is not known before, so the run "
                "would not sample what the others do; set critic.value_pretraining.until=null and critic.value_pretraining.steps"
            )
        steps = self.samples // config.batch.responses_per_step - _pretraining(config)
        if steps < 1:
            raise ConfigError(f"--samples: {self.samples} responses leave no step of {name} after its value pretraining")
        return steps

    def folder(self, planned: Run) -> Path:
        return self.output / planned.phase / planned.algorithm / f"rate_{planned.rate:g}" / f"seed_{planned.seed}"

    def settings(self, planned: Run) -> list[str]:
        config = load_config(self.files[planned.algorithm], self.overrides)
        rates = [f"policy.optimizer.lr={planned.rate!r}"]
        if config.uses_critic:
            rates.append(f"critic.optimizer.lr={planned.rate * config.critic.optimizer.lr / config.policy.optimizer.lr!r}")
        steps, seed = f"run.steps={self.steps[planned.algorithm]}", f"seed={planned.seed}"
        return [*self.overrides, *rates, steps, seed, f"run.dir={self.folder(planned)}"]

    def config(self, planned: Run) -> Config:
        if planned not in self._configs:
            self._configs[planned] = load_config(self.files[planned.algorithm], self.settings(planned))
        return self._configs[planned]

    def _planned(self, name: str, phase: str, rates: Sequence[float]) -> list[Run]:
        return [Run(name, rate, seed, phase) for seed in self.seeds[phase] for rate in rates]

    def points(self, planned: Run) -> list[Evaluated] | None:
        """Return the evaluations of a run, or None if it is missing or unfinished."""
        return read_points(self.folder(planned) / "metrics.jsonl", self.config(planned))

    def rate(self, name: str) -> float | None:
        """Return the chosen rate of an algorithm; None before all its tuning runs are finished."""
        means = {}
        for rate in self.rates:
            found = [self.points(Run(name, rate, seed, "tune")) for seed in self.seeds["tune"]]
            accuracies = [at(points, "samples", self.samples) for points in found if points is not None]
            known = [accuracy for accuracy in accuracies if accuracy is not None]
            if len(known) < len(self.seeds["tune"]):
                return None
            means[rate] = fmean(known)
        return max(means, key=lambda rate: (means[rate], -rate))

    def run_all(self, deadline: float) -> None:
        """Make all runs that are not finished: tuning runs first, seed after seed. A failed run is printed and missing in the tables."""
        for phase in self.seeds:
            chosen = {name: self.rates if phase == "tune" else [self.rate(name)] for name in self.files}
            queue = [
                planned
                for name, rates in chosen.items()
                for planned in self._planned(name, phase, [rate for rate in rates if rate is not None])
            ]
            for planned in sorted(queue, key=lambda planned: self.seeds[phase].index(planned.seed)):
                if self.points(planned) is not None:
                    continue
                if time.monotonic() > deadline:
                    print(f"{planned.name}: not started, out of time", flush=True)
                    continue
                train(planned.name, self.files[planned.algorithm], self.settings(planned), self.folder(planned))
                self.report()

    def report(self) -> None:
        """Write compare.json and compare.md from the finished runs."""
        rates = {name: self.rate(name) for name in self.files}
        curves: dict[str, dict[int, list[Evaluated]]] = {}
        missing = []
        for name, rate in rates.items():
            curves[name] = {}
            for seed in self.seeds["final"]:
                points = None if rate is None else self.points(Run(name, rate, seed, "final"))
                if points is None:
                    missing.append(f"{name} seed {seed}")
                else:
                    curves[name][seed] = points
        ends = [points[-1].seconds for runs in curves.values() for points in runs.values()]
        seconds = min(ends, default=0.0)
        document = {
            "recipe": str(self.recipe),
            "overrides": self.overrides,
            "grid": self.rates,
            "seeds": self.seeds,
            "rates": rates,
            "missing": missing,
            "samples": table(curves, "samples", self.samples),
            "seconds": table(curves, "seconds", seconds),
            "curves": {
                name: {str(seed): [[p.samples, p.seconds, p.accuracy] for p in points] for seed, points in runs.items()}
                for name, runs in curves.items()
            },
        }
        (self.output / "compare.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (self.output / "compare.md").write_text(render(document, self.samples, seconds), encoding="utf-8")
        critics = {name for name in self.files if load_config(self.files[name], self.overrides).uses_critic}
        draw(curves, critics, self.output / "compare.png")


def _named(given: str) -> tuple[str, Path | None]:
    name, _, file = given.partition("=")
    return name, Path(file) if file else None


def _pretraining(config: Config) -> int:
    """Return the rollouts of value pretraining, at most."""
    return config.critic.value_pretraining.max_steps if config.uses_critic else 0


def write_algorithm(name: str, file: Path | None, recipe: Path, folder: Path) -> Path:
    """Write the configuration of an algorithm: ``file``, or the recipe with a preset's settings other than ``SIZES``."""
    path = folder / f"{name}.yaml"
    preset = EXAMPLES / "presets" / f"{name}.yaml"
    if file is None and not preset.is_file():
        raise ConfigError(f"--algorithms: {name!r} is no preset; give NAME=FILE for a recipe of your own")
    if file is None and name.startswith("vapo_wo_"):
        return write_variant(name, recipe, path)
    settings: dict[str, Any] = {}
    if file is None and name != "vapo":
        parsed, faults = parse_yaml(preset.read_text(encoding="utf-8"))
        assert not faults and isinstance(parsed, dict)
        settings = parsed
        for keys in SIZES:
            _remove(settings, keys)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_yaml({"extends": str((file or recipe).resolve()), **settings}), encoding="utf-8")
    return path


def _remove(tree: dict[str, Any], keys: Sequence[str]) -> None:
    """Delete a nested key, and sections that this leaves empty."""
    inner = tree.get(keys[0])
    if len(keys) == 1 or inner is None:
        tree.pop(keys[0], None)
        return
    _remove(inner, keys[1:])
    if not inner:
        del tree[keys[0]]


def read_points(path: Path, config: Config) -> list[Evaluated] | None:
    """Return the evaluations of the first evaluation set, or None if the run did not reach its last step."""
    if not path.is_file():
        return None
    key, samples, seconds, step = f"eval/{config.data.eval[0].name}/avg@{config.eval.samples_per_prompt}", 0.0, 0.0, 0
    points = []
    for row in metric_rows(path):
        samples += row.get("sampling/responses") or 0
        seconds += row.get("time/step") or 0.0
        step = row["step"] if row.get("stage", "rl") == "rl" else step
        if row.get(key) is not None:
            points.append(Evaluated(samples, seconds, row[key]))
    return points if points and step == config.run.steps and points[-1].samples == samples else None


def at(points: Sequence[Evaluated], what: str, amount: float) -> float | None:
    """Return the accuracy at an amount of ``samples`` or ``seconds``, interpolated between evaluations; None beyond the last."""
    for before, after in pairwise(points):
        low, high = getattr(before, what), getattr(after, what)
        if low <= amount <= high:
            share = (amount - low) / (high - low) if high > low else 1.0
            return before.accuracy + share * (after.accuracy - before.accuracy)
    return None


def mean_curve(runs: Sequence[Sequence[Evaluated]], what: str) -> tuple[list[float], list[float]]:
    """Return amounts of ``samples`` or ``seconds``, evenly spaced up to the end of the shortest run, and the mean accuracies there."""
    end = min(getattr(points[-1], what) for points in runs)
    amounts = [end * number / CURVE_POINTS for number in range(CURVE_POINTS)] + [end]
    found = [[at(points, what, amount) for points in runs] for amount in amounts]
    return amounts, [fmean(value for value in values if value is not None) for values in found]


def draw(curves: Mapping[str, Mapping[int, Sequence[Evaluated]]], critics: Container[str], output: Path) -> None:
    """Write the mean curves by samples and by seconds as a PNG; algorithms outside ``critics`` are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), squeeze=False, sharey=True, layout="constrained")
    for number, (name, runs) in enumerate(curves.items()):
        for axis, what in zip(axes[0], ("samples", "seconds"), strict=True):
            if runs:
                style = "-" if name in critics else "--"
                axis.plot(*mean_curve(list(runs.values()), what), style, color=f"C{number}", label=f"{name} ({len(runs)} seeds)")
    axes[0][0].set(xlabel="responses sampled, value pretraining's included", ylabel="held-out accuracy, mean of the seeds")
    axes[0][1].set(xlabel="seconds of the steps")
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    if any(curves.values()):
        axes[0][0].legend(loc="best", fontsize="small")
    save_figure(figure, output)


def table(curves: Mapping[str, Mapping[int, Sequence[Evaluated]]], what: str, amount: float) -> dict[str, Any]:
    """Return for each algorithm the accuracies by seed, their mean, and the reference's paired difference with its interval."""
    found = {
        name: {seed: accuracy for seed, points in runs.items() if (accuracy := at(points, what, amount)) is not None}
        for name, runs in curves.items()
    }
    reference = next(iter(found.values()))
    return {
        name: {
            "accuracy": {str(seed): value for seed, value in mine.items()},
            "mean": fmean(mine.values()) if mine else None,
            "reference_minus_it": paired([reference[seed] - mine[seed] for seed in mine if seed in reference]),
        }
        for name, mine in found.items()
    }


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """Return mean and 95 % interval (Student's t) of paired differences; the interval is None for fewer than two."""
    if not differences:
        return {"seeds": 0, "mean": None, "interval": None}
    mean, interval = fmean(differences), None
    if len(differences) > 1:
        half = T_QUANTILES[len(differences) - 2] * stdev(differences) / math.sqrt(len(differences))
        interval = [mean - half, mean + half]
    return {"seeds": len(differences), "mean": mean, "interval": interval}


def render(document: Mapping[str, Any], samples: float, seconds: float) -> str:
    """Format both tables as markdown, with what is missing."""
    lines = []
    for what, title in (("samples", f"{samples:g} samples"), ("seconds", f"{seconds:.0f} seconds")):
        names = list(document[what])
        lines += [f"Held-out accuracy after {title}, in percent:", ""]
        lines += [f"| algorithm | rate | mean (by seed) | {names[0]} minus it, paired, 95 % | seeds |", "|---|---|---|---|---|"]
        for name in names:
            entry, rate = document[what][name], document["rates"][name]
            difference = entry["reference_minus_it"]
            mean = "-" if entry["mean"] is None else f"**{100 * entry['mean']:.1f}**"
            by_seed = ", ".join(f"{100 * value:.1f}" for value in entry["accuracy"].values()) or "none"
            shown = "-" if name == names[0] or difference["mean"] is None else f"{100 * difference['mean']:+.1f}"
            if shown != "-" and difference["interval"] is not None:
                low, high = (100 * bound for bound in difference["interval"])
                shown += f" [{low:+.1f}, {high:+.1f}]"
            lines.append(
                f"| {name} | {'not chosen' if rate is None else f'{rate:g}'} | {mean} ({by_seed}) | {shown} | {difference['seeds']} |"
            )
        lines.append("")
    if document["missing"]:
        lines.append(f"Not finished: {', '.join(document['missing'])}.")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    run(main)
