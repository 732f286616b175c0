"""Run VAPO and its seven ablations with several seeds and compare the results with Table 1 of the paper (arXiv:2504.05118).

    python tools/ablation.py --output runs/ablation --seeds 1 2
    python tools/ablation.py --output runs/ablation --seeds 1 2 --report-only

Runs execute one at a time, seed after seed. Finished runs are not repeated, so an interrupted command can be started again. Every variant
is the recipe (default: the quickstart) plus the settings of its preset; other settings of the recipe are kept. Results are read from the
runs' metrics.jsonl, and ``<output>/ablation.md`` and ``ablation.json`` are written after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from plot_run import evaluations, read_rows, running_mean, series
from toolkit import run

from vapo_mcore.config import Config, load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.yaml_text import format_yaml, parse_yaml
from vapo_mcore.errors import ConfigError, DataError
from vapo_mcore.evaluation.intervals import wilson_interval
from vapo_mcore.metrics_file import metric_rows

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "configs"

# Preset -> AIME 2024 avg@32 of the paper's Table 1 (Qwen2.5-32B).
PAPER_TABLE_1 = {
    "vapo": 60,
    "vapo_wo_value_pretraining": 11,
    "vapo_wo_decoupled_gae": 33,
    "vapo_wo_length_adaptive_gae": 45,
    "vapo_wo_clip_higher": 46,
    "vapo_wo_token_level_loss": 53,
    "vapo_wo_positive_lm_loss": 54,
    "vapo_wo_group_sampling": 55,
}
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# Disable output that an ablation does not use.
FIXED = ("run.samples_per_step=0", "run.tensorboard=false", "export.at_end=false", "eval.at_start=false", "eval.every_steps=0")


@dataclass(frozen=True)
class Measured:
    """Results of one finished run.

    ``accuracy``: last evaluation, over ``problems``. ``steps_to_threshold``: RL steps until the 5-step running mean of the training
    accuracy reached the threshold, or None. ``seconds``: time of all steps, including value pretraining.
    """

    seed: int
    accuracy: float
    problems: int
    steps_to_threshold: int | None
    seconds: float
    train_accuracy_last_steps: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Run VAPO and its seven ablations and write the table.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs and the table")
    parser.add_argument("--recipe", type=Path, default=EXAMPLES / "quickstart.yaml", help="base recipe (default: the quickstart)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--steps", type=int, help="RL steps of each run (default: the recipe's)")
    parser.add_argument("--threshold", type=float, default=0.5, help="report the first step with this training accuracy (default: 0.5)")
    parser.add_argument("--only", nargs="+", choices=list(PAPER_TABLE_1), default=list(PAPER_TABLE_1), help="run only these variants")
    parser.add_argument("--report-only", action="store_true", help="start no run; write the table of the finished runs")
    parser.add_argument("--stop-after-minutes", type=float, default=math.inf, help="start no further run after this many minutes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for every variant")
    args = parser.parse_args()
    if len(set(args.seeds)) != len(args.seeds) or len(args.seeds) > len(T_QUANTILES) + 1:
        raise ConfigError(f"--seeds: {args.seeds} must be different numbers, at most {len(T_QUANTILES) + 1}")
    ablation = Ablation(args.recipe, args.output, args.only, args.seeds, args.steps, args.set)
    if not args.report_only:
        ablation.run_all(time.monotonic() + 60 * args.stop_after_minutes, args.threshold)
    ablation.report(args.threshold)


class Ablation:
    """Runs all variants and seeds in one folder. Checks every configuration before the first run starts."""

    def __init__(self, recipe: Path, output: Path, names: Sequence[str], seeds: Sequence[int], steps: int | None, settings: list[str]):
        self.output, self.names, self.seeds = output, list(names), list(seeds)
        self.overrides = [*FIXED, *([] if steps is None else [f"run.steps={steps}"]), *settings]
        self.files = {name: write_variant(name, recipe, output / "configs" / f"{name}.yaml") for name in names}
        self.configs = {(name, seed): load_config(self.files[name], self._settings(name, seed)) for name in names for seed in seeds}
        self.failures: dict[str, str] = {}
        for key in self.configs:
            self._check_saved(*key)

    def folder(self, name: str, seed: int) -> Path:
        return self.output / "runs" / name / f"seed_{seed}"

    def _settings(self, name: str, seed: int) -> list[str]:
        return [*self.overrides, f"seed={seed}", f"run.dir={self.folder(name, seed)}"]

    def _check_saved(self, name: str, seed: int) -> None:
        """Raise ConfigError if an existing run has other settings. Ignores keys that a newer version added."""
        require_same_settings(self.folder(name, seed), self.configs[name, seed])

    def run_all(self, deadline: float, threshold: float) -> None:
        """Run everything that is not finished. A failed run is reported and omitted from the table."""
        for seed in self.seeds:
            for name in self.names:
                if self.measure(name, seed, threshold) is not None:
                    continue
                if time.monotonic() > deadline:
                    print(f"{name} seed {seed}: not started, out of time", flush=True)
                    continue
                failure = train(f"{name} seed {seed}", self.files[name], self._settings(name, seed), self.folder(name, seed))
                if failure is not None:
                    self.failures[f"{name} seed {seed}"] = failure
                self.report(threshold)

    def measure(self, name: str, seed: int, threshold: float) -> Measured | None:
        """Return the results of a finished run, or None if it is missing or unfinished."""
        path = self.folder(name, seed) / "metrics.jsonl"
        if not path.is_file():
            return None
        try:
            return measure(path, self.configs[name, seed], threshold)
        except DataError:  # interrupted before the first RL step
            return None

    def report(self, threshold: float) -> None:
        """Write ablation.json and ablation.md from the finished runs."""
        results = {}
        for name in self.names:
            found = [self.measure(name, seed, threshold) for seed in self.seeds]
            results[name] = [measured for measured in found if measured is not None]
        table = {name: summarise(runs) | {"paper_aime24_avg32": PAPER_TABLE_1[name]} for name, runs in results.items()}
        missing = [f"{name} seed {seed}" for name in self.names for seed in self.seeds if seed not in {r.seed for r in results[name]}]
        document = {"threshold": threshold, "overrides": self.overrides, "variants": table, "missing": missing, "failed": self.failures}
        (self.output / "ablation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        text = render(table, threshold) + ("" if not missing else f"\nNot finished: {', '.join(missing)}.\n")
        (self.output / "ablation.md").write_text(text, encoding="utf-8")


def require_same_settings(folder: Path, config: Config) -> None:
    """Raise ConfigError if ``folder`` holds a run with other settings. Ignores keys that a newer version added."""
    saved = folder / "config.yaml"
    if saved.is_file():
        before, _ = parse_yaml(saved.read_text(encoding="utf-8"))
        now, _ = parse_yaml(dump_yaml(config))
        changed = sorted(differences(before, now))
        if changed:
            raise ConfigError(f"{folder} holds a run with other settings ({', '.join(changed)}); choose another --output")


def train(name: str, file: Path, settings: Sequence[str], folder: Path) -> str | None:
    """Run a training and print how it ended; its output goes to ``<folder>.log``. Returns None or the failure."""
    log = folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(log, "w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "vapo_mcore.cli", "train", str(file), "--clean", *settings]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    failure = None if code == 0 else f"failed with exit status {code}, see {log}"
    print(f"{name}: {failure or 'finished'} ({time.monotonic() - started:.0f} s)", flush=True)
    return failure


def write_variant(name: str, recipe: Path, path: Path) -> Path:
    """Write a configuration that extends the recipe with the preset's settings (none for ``vapo``, which the recipe extends already)."""
    preset, faults = parse_yaml((EXAMPLES / "presets" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert not faults and isinstance(preset, dict)
    preset.pop("extends", None)
    settings: dict[str, Any] = {} if name == "vapo" else preset
    if name == "vapo_wo_group_sampling":  # same number of responses per step, each to a different prompt
        settings = {"batch": {"prompts_per_step": load_config(recipe).batch.responses_per_step, "responses_per_prompt": 1}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_yaml({"extends": str(recipe.resolve()), **settings}), encoding="utf-8")
    return path


def differences(before: Any, now: Any, where: str = "") -> set[str]:
    """Return the dotted keys of ``before`` whose value differs in ``now``."""
    if isinstance(before, dict) and isinstance(now, dict):
        return {found for key in before for found in differences(before[key], now.get(key), f"{where}.{key}" if where else str(key))}
    return set() if before == now else {where}


def measure(path: Path, config: Config, threshold: float) -> Measured | None:
    """Read the results from a metrics.jsonl; None if the run did not reach its last step."""
    rl_rows = read_rows(path)
    if rl_rows[-1]["step"] != config.run.steps:
        return None
    label = f"{config.data.eval[0].name} avg@{config.eval.samples_per_prompt}"
    points = evaluations(rl_rows).get(label, [])
    if not points or points[-1].step != config.run.steps:
        return None
    steps, accuracies = series(rl_rows, "accuracy/mean")
    reached = (step for step, mean in zip(steps[4:], running_mean(accuracies, 5)[4:], strict=True) if mean >= threshold)
    return Measured(
        seed=config.seed,
        accuracy=points[-1].accuracy,
        problems=rl_rows[-1][f"eval/{config.data.eval[0].name}/prompts"],
        steps_to_threshold=next(reached, None),
        seconds=sum(row.get("time/step", 0.0) for row in metric_rows(path)),
        train_accuracy_last_steps=fmean(accuracies[-5:]),
    )


def summarise(runs: Sequence[Measured]) -> dict[str, Any]:
    """Compute the mean over seeds with two intervals: Student's t over seeds, and Wilson over all graded problems of all seeds."""
    if not runs:
        return {"runs": [], "mean": None, "seed_interval": None, "problem_interval": None}
    accuracies, problems = [r.accuracy for r in runs], sum(r.problems for r in runs)
    interval = None
    if len(runs) > 1:
        half = T_QUANTILES[len(runs) - 2] * stdev(accuracies) / math.sqrt(len(runs))
        interval = [max(0.0, fmean(accuracies) - half), min(1.0, fmean(accuracies) + half)]
    return {
        "runs": [asdict(r) for r in runs],
        "mean": fmean(accuracies),
        "seed_interval": interval,
        "problem_interval": list(wilson_interval(sum(r.accuracy * r.problems for r in runs), problems)),
    }


def render(table: dict[str, dict[str, Any]], threshold: float) -> str:
    """Format the results as a markdown table."""
    lines = [
        "| variant | paper, AIME24 avg@32 | held-out accuracy, mean (by seed) | 95 % over seeds (t) | 95 % over problems (Wilson) | "
        f"steps to {threshold:g} | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in table.items():
        runs = entry["runs"]
        if not runs:
            lines.append(f"| {name} | {entry['paper_aime24_avg32']} | - | - | - | - | - |")
            continue
        by_seed = ", ".join(f"{100 * r['accuracy']:.1f}" for r in runs)
        steps = ", ".join("never" if r["steps_to_threshold"] is None else str(r["steps_to_threshold"]) for r in runs)
        seconds = ", ".join(f"{r['seconds']:.0f}" for r in runs)
        lines.append(
            f"| {name} | {entry['paper_aime24_avg32']} | **{100 * entry['mean']:.1f}** ({by_seed}) | {_percent(entry['seed_interval'])} | "
            f"{_percent(entry['problem_interval'])} | {steps} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def _percent(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{100 * interval[0]:.1f} - {100 * interval[1]:.1f}"


if __name__ == "__main__":
    run(main)
