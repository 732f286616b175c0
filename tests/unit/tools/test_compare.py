"""The comparison of algorithms: configurations, the choice of rates, and tables from synthetic run folders."""

import json
from pathlib import Path

import compare
import pytest

from tests.unit.config_helpers import write_base
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.errors import ConfigError

RECIPE = """
critic: {value_pretraining: {steps: 2}, optimizer: {lr: 2.0e-3}}
policy: {optimizer: {lr: 1.0e-3}}
algorithm: {advantage: {lambda_policy: {kind: length_adaptive, alpha: 0.5}}}
"""
RATES, TUNING, SEEDS = (1e-3, 3e-3), (11, 12), (1, 2, 3, 4, 5)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_base(tmp_path)
    path.write_text(path.read_text() + RECIPE)
    return path


def make(recipe: Path, *, algorithms=("vapo", "grpo"), rates=RATES, tuning=TUNING, seeds=SEEDS, samples=None) -> compare.Comparison:
    return compare.Comparison(recipe, recipe.parent / "out", algorithms, rates, tuning, seeds, samples, ["run.steps=4"])


def write_run(study: compare.Comparison, run: compare.Run, accuracies: list[float], *, seconds: float = 1.0, factor: int = 1) -> None:
    """Write a run that was evaluated at its start and after each step. ``factor``: responses sampled for one that is kept."""
    config, folder = study.config(run), study.folder(run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    responses = config.batch.responses_per_step
    before, *after = accuracies
    name = f"eval/{config.data.eval[0].name}/avg@1"
    rows = [{"step": 0, "stage": "rl", name: before}]
    pretraining = config.critic.value_pretraining.steps if config.uses_critic else 0
    rows += [{"step": n + 1, "stage": "value_pretraining", "sampling/responses": responses, "time/step": 2.0} for n in range(pretraining)]
    rows += [
        {"step": n, "stage": "rl", "sampling/responses": factor * responses, "time/step": seconds, name: accuracy}
        for n, accuracy in enumerate(after, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_each_algorithm_has_the_same_samples_and_the_recipes_sizes(recipe: Path) -> None:
    study = make(recipe, algorithms=("vapo", "grpo", "ppo", "dapo", "vapo_wo_value_pretraining", "vapo_wo_decoupled_gae"))
    configs = {name: study.config(compare.Run(name, 3e-3, 1, "final")) for name in study.files}
    vapo, responses = configs["vapo"], configs["vapo"].batch.responses_per_step
    assert study.samples == 6 * responses
    assert {name: config.run.steps for name, config in configs.items()} == {
        "vapo": 4,
        "grpo": 6,
        "ppo": 6,
        "dapo": 6,
        "vapo_wo_value_pretraining": 6,
        "vapo_wo_decoupled_gae": 4,
    }
    assert all(config.batch == vapo.batch and config.seed == 1 for config in configs.values())
    assert configs["grpo"].algorithm.advantage.estimator == "grpo" and configs["ppo"].algorithm.advantage.lambda_critic == 0.95
    assert configs["dapo"].rollout.dynamic_sampling.enabled and configs["dapo"].reward.overlong is None
    assert vapo.algorithm.advantage.lambda_policy.alpha == 0.5, "what the recipe adapts stays"
    assert all(config.policy.optimizer.lr == 3e-3 for config in configs.values())
    assert vapo.critic.optimizer.lr == pytest.approx(6e-3), "the critic's rate keeps its ratio"
    assert study.config(compare.Run("vapo", 1e-3, 11, "tune")).run.dir.endswith("out/tune/vapo/rate_0.001/seed_11")


def finish_tuning(study: compare.Comparison, best: dict[str, float]) -> None:
    """For each algorithm the rate of ``best`` ends at 0.6, others at 0.5."""
    for name, rate in ((name, rate) for name in study.files for rate in study.rates):
        for seed in TUNING:
            steps = study.steps[name]
            write_run(study, compare.Run(name, rate, seed, "tune"), [0.2] * steps + [0.6 if rate == best[name] else 0.5])


def test_rates_are_chosen_on_the_tuning_seeds_and_equal_ones_give_the_lowest(recipe: Path) -> None:
    study = make(recipe)
    finish_tuning(study, {"vapo": 3e-3, "grpo": 0.0})
    assert study.rate("vapo") == 3e-3 and study.rate("grpo") == 1e-3
    (study.folder(compare.Run("vapo", 1e-3, 12, "tune")) / "metrics.jsonl").unlink()
    assert study.rate("vapo") is None, "not before all its tuning runs are finished"


def test_tables_at_equal_samples_and_seconds_with_paired_intervals(recipe: Path) -> None:
    study = make(recipe)
    finish_tuning(study, {"vapo": 3e-3, "grpo": 1e-3})
    vapo, grpo = [0.60, 0.70, 0.65, 0.75, 0.80], [0.50, 0.65, 0.60, 0.60, 0.70]
    for seed, mine, theirs in zip(SEEDS, vapo, grpo, strict=True):
        # VAPO: 2 x 2 s of value pretraining, then 4 steps of 2 s; GRPO: 6 steps of 1 s
        write_run(study, compare.Run("vapo", 3e-3, seed, "final"), [0.2, 0.2, 0.2, 0.4, mine], seconds=2.0)
        write_run(study, compare.Run("grpo", 1e-3, seed, "final"), [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, theirs])
    study.report()
    report = json.loads((study.output / "compare.json").read_text())
    assert report["missing"] == [] and report["rates"] == {"vapo": 3e-3, "grpo": 1e-3}
    entry = report["samples"]["grpo"]
    assert entry["accuracy"] == {str(seed): value for seed, value in zip(SEEDS, grpo, strict=True)}
    # differences 0.10, 0.05, 0.05, 0.15, 0.10: mean 0.09, s = 0.041833, 2.776 s / sqrt(5) = 0.051936
    assert entry["reference_minus_it"]["mean"] == pytest.approx(0.09) and entry["reference_minus_it"]["seeds"] == 5
    assert entry["reference_minus_it"]["interval"] == pytest.approx([0.038064, 0.141936], abs=2e-5)
    # after 6 s, GRPO's last, VAPO has made one step of the four
    assert report["seconds"]["vapo"]["mean"] == pytest.approx(0.2)
    assert report["seconds"]["grpo"]["mean"] == pytest.approx(0.61)
    text = (study.output / "compare.md").read_text()
    assert "| vapo | 0.003 | **70.0** (60.0, 70.0, 65.0, 75.0, 80.0) | - | 5 |" in text
    assert "| grpo | 0.001 | **61.0** (50.0, 65.0, 60.0, 60.0, 70.0) | +9.0 [+3.8, +14.2] | 5 |" in text
    assert "after 6 seconds" in text and "Not finished" not in text


def test_dropped_samples_count_and_accuracy_is_interpolated(recipe: Path) -> None:
    study = make(recipe, algorithms=("vapo", "dapo"))
    run = compare.Run("dapo", 1e-3, 1, "final")
    write_run(study, run, [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], factor=2)
    points = study.points(run)
    assert points is not None and [point.samples for point in points] == [2 * step * study.samples / 6 for step in range(7)]
    assert compare.at(points, "samples", study.samples) == pytest.approx(0.5), "after 3 steps of twice the responses"
    assert compare.at(points, "samples", 2.5 * study.samples / 6) == pytest.approx(0.325)
    assert compare.at(points, "samples", 3 * study.samples) is None
    assert compare.paired([0.1]) == {"seeds": 1, "mean": 0.1, "interval": None}


def test_mean_curves_end_with_the_shortest_run_and_are_drawn(tmp_path: Path) -> None:
    first = [compare.Evaluated(0, 0, 0.2), compare.Evaluated(100, 10, 0.4), compare.Evaluated(200, 30, 0.8)]
    second = [compare.Evaluated(0, 0, 0.4), compare.Evaluated(150, 20, 0.7)]
    amounts, means = compare.mean_curve([first, second], "samples")
    by_samples = dict(zip(amounts, means, strict=True))
    assert (amounts[0], amounts[-1]) == (0, 150) and len(amounts) == compare.CURVE_POINTS + 1
    assert by_samples[0] == pytest.approx(0.3), "mean of 0.2 and 0.4"
    assert by_samples[75] == pytest.approx((0.35 + 0.55) / 2), "each interpolated between its own evaluations"
    assert by_samples[150] == pytest.approx((0.6 + 0.7) / 2)
    assert compare.mean_curve([first, second], "seconds")[1][-1] == pytest.approx((0.6 + 0.7) / 2), "after 20 s"
    compare.draw({"vapo": {1: first, 2: second}, "grpo": {}}, {"vapo"}, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_unfinished_runs_are_missing_and_pairs_are_of_the_same_seed(recipe: Path) -> None:
    study = make(recipe)
    finish_tuning(study, {"vapo": 3e-3, "grpo": 1e-3})
    write_run(study, compare.Run("vapo", 3e-3, 1, "final"), [0.2, 0.2, 0.2, 0.2, 0.7])
    write_run(study, compare.Run("vapo", 3e-3, 2, "final"), [0.2, 0.2])
    for seed, accuracy in ((1, 0.6), (2, 0.1)):
        write_run(study, compare.Run("grpo", 1e-3, seed, "final"), [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, accuracy])
    study.report()
    report = json.loads((study.output / "compare.json").read_text())
    assert report["missing"] == [f"vapo seed {n}" for n in (2, 3, 4, 5)] + [f"grpo seed {n}" for n in (3, 4, 5)]
    assert report["samples"]["grpo"]["reference_minus_it"] == {"seeds": 1, "mean": pytest.approx(0.1), "interval": None}


def test_all_runs_are_made_once_tuning_first(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, made = make(recipe), []

    def train(name, file, settings, folder):
        phase, algorithm, _, rate, _, seed = name.split()
        run = compare.Run(algorithm, float(rate), int(seed), phase)
        assert study.folder(run) == folder and f"seed={seed}" in settings
        accuracy = 0.6 if run.rate == 3e-3 else 0.5
        write_run(study, run, [0.2] * study.steps[algorithm] + [accuracy])
        made.append(run)

    monkeypatch.setattr(compare, "train", train)
    study.run_all(float("inf"))
    assert len(made) == 2 * 2 * 2 + 2 * 5 and [run.phase for run in made] == ["tune"] * 8 + ["final"] * 10
    assert {run.rate for run in made[8:]} == {3e-3} and [run.seed for run in made[8:12]] == [1, 1, 2, 2]
    study.run_all(float("inf"))
    assert len(made) == 18, "finished runs are not repeated"
    with pytest.raises(ConfigError, match=r"other settings \(.*policy.epochs"):
        compare.Comparison(recipe, study.output, ("vapo", "grpo"), RATES, TUNING, SEEDS, None, ["run.steps=4", "policy.epochs=2"])


WRONG = {
    "few": ({"seeds": (1, 2, 3, 4)}, "--seeds: .* must be 5 to 10 different numbers"),
    "shared": ({"tuning": (5, 6)}, "--tuning-seeds: .* none of them in --seeds"),
    "rates": ({"rates": (1e-3, 1e-3)}, "--rates: .* must be different positive numbers"),
    "twice": ({"algorithms": ("vapo", "vapo")}, "--algorithms: names one twice"),
    "unknown": ({"algorithms": ("vapo", "a2c")}, "--algorithms: 'a2c' is no preset; give NAME=FILE"),
    "samples": ({"samples": 7}, "--samples: 7 is no multiple of the recipe's"),
    "short": ({"samples": 2 * 4096}, "leave no step of vapo after its value pretraining"),
}


def test_a_pretraining_of_unknown_length_is_refused(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("{steps: 2}", "{until: {value_loss_below: 0.1, max_steps: 8}}"))
    with pytest.raises(ConfigError, match=r"vapo: critic\.value_pretraining\.until ends .* set critic\.value_pretraining\.until=null"):
        make(recipe)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(recipe: Path, case: str) -> None:
    change, message = WRONG[case]
    if case == "short":
        change = {"samples": 2 * make(recipe).config(compare.Run("vapo", 1e-3, 1, "final")).batch.responses_per_step}
    with pytest.raises(ConfigError, match=message):
        make(recipe, **change)
