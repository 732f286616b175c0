"""The ablation's configurations, what it reads from metrics, and its intervals."""

import json
from pathlib import Path

import ablation
import pytest

from tests.unit.config_helpers import write_base
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.errors import ConfigError

RECIPE = "\ncritic: {epochs: 2}\nalgorithm: {advantage: {lambda_policy: {kind: length_adaptive, alpha: 0.5}}}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_base(tmp_path)
    path.write_text(path.read_text() + RECIPE)
    return path


def make(recipe: Path, folder: Path, **changes) -> ablation.Ablation:
    settings = {"names": list(ablation.PAPER_TABLE_1), "seeds": [1, 2], "steps": 6, "settings": []} | changes
    return ablation.Ablation(recipe, folder / "out", **settings)


def test_each_variant_differs_from_the_recipe_in_its_technique_alone(recipe, tmp_path):
    configs = make(recipe, tmp_path).configs
    vapo = configs["vapo", 1].model_dump()
    changed = {
        name: {key for key in ablation.differences(vapo, configs[name, 1].model_dump()) if key != "run.dir"}
        for name in ablation.PAPER_TABLE_1
    }
    policy_lambda = "algorithm.advantage.lambda_policy"
    assert changed == {
        "vapo": set(),
        "vapo_wo_value_pretraining": {"critic.value_pretraining.steps"},
        "vapo_wo_decoupled_gae": {"algorithm.advantage.lambda_critic"},
        "vapo_wo_length_adaptive_gae": {f"{policy_lambda}.kind", f"{policy_lambda}.alpha"},
        "vapo_wo_clip_higher": {"algorithm.policy_loss.clip_high"},
        "vapo_wo_token_level_loss": {"algorithm.policy_loss.aggregation"},
        "vapo_wo_positive_lm_loss": {"algorithm.positive_lm.coef"},
        "vapo_wo_group_sampling": {"batch.prompts_per_step", "batch.responses_per_prompt"},
    }
    grouped, single = configs["vapo", 1].batch, configs["vapo_wo_group_sampling", 1].batch
    assert single.responses_per_prompt == 1 and single.responses_per_step == grouped.responses_per_step
    assert configs["vapo", 1].critic.epochs == 2, "what the recipe adapts stays"


def write_run(folder: Path, config, accuracies: list[float], final: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(config))
    rows = [{"step": 1, "stage": "value_pretraining", "time/step": 2.0}]
    rows += [{"step": n, "stage": "rl", "time/step": 1.0, "accuracy/mean": a} for n, a in enumerate(accuracies, 1)]
    if len(accuracies) == config.run.steps:
        rows[-1] |= {"eval/chain_sum/avg@1": final, "eval/chain_sum/prompts": 10}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_finished_runs_are_measured_and_others_are_missing(recipe, tmp_path):
    study = make(recipe, tmp_path, names=["vapo"])
    write_run(study.folder("vapo", 1), study.configs["vapo", 1], [0.0, 0.5, 0.5, 0.5, 0.5, 1.0], 0.8)
    write_run(study.folder("vapo", 2), study.configs["vapo", 2], [0.5, 0.5], 0.9)
    first = study.measure("vapo", 1, 0.5)
    assert first == ablation.Measured(1, 0.8, 10, 6, 8.0, pytest.approx(0.6))  # mean of steps 2..6 is 0.6, of 1..5 is 0.4
    assert study.measure("vapo", 1, 0.7).steps_to_threshold is None
    assert study.measure("vapo", 2, 0.5) is None
    study.report(0.5)
    report = json.loads((study.output / "ablation.json").read_text())
    assert report["missing"] == ["vapo seed 2"] and report["variants"]["vapo"]["mean"] == 0.8
    assert "| vapo | 60 | **80.0** (80.0) | - |" in (study.output / "ablation.md").read_text()


def test_a_run_of_other_settings_is_refused(recipe, tmp_path):
    study = make(recipe, tmp_path, names=["vapo"])
    write_run(study.folder("vapo", 1), study.configs["vapo", 1], [0.5], 0.5)
    with pytest.raises(ConfigError, match=r"other settings \(policy.epochs\)"):
        make(recipe, tmp_path, names=["vapo"], settings=["policy.epochs=2"])


def test_failed_runs_are_told_and_left_out(recipe, tmp_path, monkeypatch):
    study = make(recipe, tmp_path, names=["vapo", "vapo_wo_clip_higher"], seeds=[1])
    commands = []

    def run(command, **_):
        commands.append(command)
        return ablation.subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(ablation.subprocess, "run", run)
    study.run_all(deadline=float("inf"), threshold=0.5)
    assert len(commands) == 2 and "--clean" in commands[0] and "seed=1" in commands[0]
    report = json.loads((study.output / "ablation.json").read_text())
    assert set(report["failed"]) == {"vapo seed 1", "vapo_wo_clip_higher seed 1"} == set(report["missing"])
    assert all("exit status 3" in reason for reason in report["failed"].values())


def test_intervals_by_hand():
    runs = [ablation.Measured(seed, accuracy, 100, None, 1.0, 0.5) for seed, accuracy in ((1, 0.5), (2, 0.6))]
    found = ablation.summarise(runs)
    # s = 0.0707107, 12.706 s / sqrt(2) = 0.6353: beyond [0, 1]; Wilson of 110 / 200.
    assert found["mean"] == pytest.approx(0.55) and found["seed_interval"] == [0.0, 1.0]
    assert found["problem_interval"] == pytest.approx([0.4808, 0.6174], abs=1e-3)
    three = [*runs, ablation.Measured(3, 0.55, 100, None, 1.0, 0.5)]
    assert ablation.summarise(three)["seed_interval"] == pytest.approx([0.55 - 4.303 * 0.05 / 3**0.5, 0.55 + 4.303 * 0.05 / 3**0.5])


def test_the_seed_and_folder_of_a_run_are_its_own(recipe, tmp_path):
    study = make(recipe, tmp_path)
    folders = {config.run.dir for config in study.configs.values()}
    assert len(folders) == len(study.configs) == 16
    assert all(config.seed == seed and config.run.steps == 6 for (_, seed), config in study.configs.items())
    assert load_config(study.files["vapo"]).critic.epochs == 2
