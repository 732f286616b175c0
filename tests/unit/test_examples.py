"""Every YAML file in examples/configs is a valid recipe, or a preset that is valid on top of the quickstart."""

from pathlib import Path

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import write_model
from vapo_mcore.config import Config, load_config

CONFIGS = ROOT / "examples" / "configs"
TUTORIAL = ROOT / "examples" / "tutorial" / "recipe.yaml"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
PRESETS = sorted((CONFIGS / "presets").glob("*.yaml"))


def _on_quickstart(preset: str, folder: Path) -> Config:
    """The quickstart with another preset, as a recipe would write it."""
    path = folder / "recipe.yaml"
    path.write_text(f"extends: [{CONFIGS}/quickstart.yaml, {CONFIGS}/presets/{preset}.yaml]\nbatch: {{prompts_per_step: 128}}\n")
    lengths = ["reward.overlong.cache=32"] if preset in ("dapo", "nemo_rl_ppo") else []
    return load_config(path, lengths, check_paths=False)


@pytest.mark.parametrize("path", [*RECIPES, TUTORIAL], ids=lambda path: path.stem)
def test_recipe_is_valid(path: Path) -> None:
    load_config(path, check_paths=False)


@pytest.mark.parametrize("preset", [path.stem for path in PRESETS])
def test_preset_is_valid_on_the_quickstart(preset: str, tmp_path: Path) -> None:
    _on_quickstart(preset, tmp_path)


def test_no_yaml_of_the_examples_is_left_out() -> None:
    """Recipes and presets are checked here and planned in tests/distributed; clusters in tests/unit/launch."""
    found = {path for suffix in ("yaml", "yml") for path in (ROOT / "examples").rglob(f"*.{suffix}")}
    assert found == {*RECIPES, TUTORIAL, *PRESETS, *(CONFIGS / "clusters").glob("*.yaml")}


def test_presets_only_hold_the_algorithm(tmp_path: Path) -> None:
    base = load_config(CONFIGS / "quickstart.yaml", check_paths=False)
    for preset in PRESETS:
        config = _on_quickstart(preset.stem, tmp_path)
        for section in ("run", "model", "parallel", "data", "eval", "export"):
            assert getattr(config, section) == getattr(base, section), (preset.stem, section)


def test_a_preset_does_not_depend_on_the_one_below(tmp_path: Path) -> None:
    for lower in ("dapo", "reinforce_pp", "nemo_rl_ppo", "vapo_wo_length_adaptive_gae", "grpo_process", "vapo_review"):
        path = tmp_path / "stack.yaml"
        presets = CONFIGS / "presets"
        path.write_text(f"extends: [{CONFIGS}/quickstart.yaml, {presets}/{lower}.yaml, {presets}/vapo.yaml]\n")
        stacked, plain = load_config(path, check_paths=False), _on_quickstart("vapo", tmp_path)
        assert stacked.algorithm == plain.algorithm
        assert stacked.reward == plain.reward
        assert stacked.rollout == plain.rollout


def test_quickstart_passes_the_rules_about_its_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("")
    rows = [f"data.train.0.path={tmp_path}/rows.jsonl", f"data.eval.0.path={tmp_path}/rows.jsonl"]
    load_config(CONFIGS / "quickstart.yaml", [f"model.path={tmp_path}/model", *rows])


# What the sources say about each system (spec of the algorithm, section 9.13; paper, section 5.1 and Table 1).
DIFFERENCES_FROM_VAPO = {
    "vapo_wo_decoupled_gae": {"advantage.lambda_critic": 0.95},
    "vapo_wo_length_adaptive_gae": {"advantage.lambda_policy.kind": "fixed", "advantage.lambda_policy.value": 0.95},
    "vapo_wo_clip_higher": {"policy_loss.clip_high": 0.2},
    "vapo_wo_token_level_loss": {"policy_loss.aggregation": "sequence"},
    "vapo_wo_positive_lm_loss": {"positive_lm.coef": 0.0},
    "vapo_wo_value_pretraining": {},
    "vapo_wo_group_sampling": {},
    "vapo_review": {
        "advantage.lambda_policy.kind": "sigmoid",
        "advantage.values": "after_update",
        "positive_lm.coef": 0.0,
        "self_imitation.capacity": 512,
        "self_imitation.keep": "top_reward",
        "self_imitation.skip_overlong": False,
        "self_imitation.top_k": 1,
        "self_imitation.every_steps": 1,
        "self_imitation.batch_size": 64,
        "self_imitation.coef": 1.0,
        "self_imitation.lr": None,
        "self_imitation.value_coef": 0.0,
    },
    "ppo": {
        "advantage.lambda_policy.kind": "fixed",
        "advantage.lambda_policy.value": 0.95,
        "advantage.lambda_critic": 0.95,
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "sequence",
        "positive_lm.coef": 0.0,
    },
    "dapo": {"advantage.estimator": "grpo", "advantage.whiten": "off", "positive_lm.coef": 0.0},
    "gspo": {
        "advantage.estimator": "grpo",
        "advantage.whiten": "off",
        "policy_loss.kind": "gspo",
        "policy_loss.clip_low": 3e-4,
        "policy_loss.clip_high": 4e-4,
        "policy_loss.aggregation": "sequence",
        "positive_lm.coef": 0.0,
    },
    "cispo": {
        "advantage.estimator": "grpo",
        "advantage.whiten": "off",
        "policy_loss.kind": "cispo",
        "policy_loss.clip_high": 4.0,
        "positive_lm.coef": 0.0,
    },
    "clip_cov": {
        "advantage.estimator": "grpo",
        "advantage.whiten": "off",
        "policy_loss.kind": "clip_cov",
        "positive_lm.coef": 0.0,
    },
    "kl_cov": {
        "advantage.estimator": "grpo",
        "advantage.whiten": "off",
        "policy_loss.kind": "kl_cov",
        "policy_loss.covariance.fraction": 2e-3,
        "positive_lm.coef": 0.0,
    },
    "grpo": {
        "advantage.estimator": "grpo",
        "advantage.whiten": "off",
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "sequence",
        "positive_lm.coef": 0.0,
        "kl.place": "loss",
        "kl.kind": "k3",
        "kl.coef": 0.04,
    },
    "grpo_process": {
        "advantage.estimator": "grpo_process",
        "advantage.whiten": "off",
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "sequence",
        "positive_lm.coef": 0.0,
        "kl.place": "loss",
        "kl.kind": "k3",
        "kl.coef": 0.04,
    },
    "dr_grpo": {
        "advantage.estimator": "dr_grpo",
        "advantage.whiten": "off",
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "fixed_length",
        "positive_lm.coef": 0.0,
    },
    "vc_ppo": {
        "advantage.lambda_policy.kind": "fixed",
        "advantage.lambda_policy.value": 0.95,
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "sequence",
        "positive_lm.coef": 0.0,
    },
    "orz": {
        "advantage.lambda_policy.kind": "fixed",
        "advantage.lambda_policy.value": 1.0,
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "sequence",
        "positive_lm.coef": 0.0,
    },
    "nemo_rl_ppo": {
        "advantage.lambda_policy.kind": "fixed",
        "advantage.lambda_policy.value": 0.95,
        "advantage.lambda_critic": 0.95,
        "policy_loss.dual_clip": 10.0,
        "value_loss.clip": 0.2,
        "positive_lm.coef": 0.0,
    },
    "rloo": {
        "advantage.estimator": "rloo",
        "advantage.whiten": "off",
        "policy_loss.clip_high": 0.2,
        "policy_loss.aggregation": "sequence_sum",
        "positive_lm.coef": 0.0,
        "kl.place": "reward",
        "kl.kind": "k1",
        "kl.coef": 0.05,
    },
    "raw_reward": {
        "advantage.estimator": "reinforce",
        "advantage.whiten": "off",
        "policy_loss.clip_high": 0.2,
        "positive_lm.coef": 0.0,
    },
    "reinforce_pp": {
        "advantage.estimator": "reinforce_pp",
        "policy_loss.clip_high": 0.2,
        "positive_lm.coef": 0.0,
        "kl.place": "reward",
        "kl.kind": "k1",
        "kl.coef": 0.01,
    },
}


def test_the_differences_of_every_preset_are_given() -> None:
    assert set(DIFFERENCES_FROM_VAPO) | {"vapo"} == {path.stem for path in PRESETS}


@pytest.mark.parametrize("preset", DIFFERENCES_FROM_VAPO)
def test_preset_differs_from_vapo_exactly_in(preset: str, tmp_path: Path) -> None:
    vapo = _flat(_on_quickstart("vapo", tmp_path).algorithm.model_dump())
    other = _flat(_on_quickstart(preset, tmp_path).algorithm.model_dump())
    differences = {key: value for key, value in other.items() if key not in vapo or value != vapo[key]}
    expected = {key: value for key, value in DIFFERENCES_FROM_VAPO[preset].items() if key not in vapo or value != vapo[key]}
    assert differences == expected


NO_PRETRAINING = {"pretraining": False}
PLUS_MINUS_ONE = {"reward.scale": ((0.0, 1.0), (-1.0, 1.0)), "reward.overlong": (32, 1.0)}
CRITIC_FREE = {"critic": False, "pretraining": False}

# Outside the algorithm's section a preset is as vapo's, but for these.
OTHER_DIFFERENCES = {
    "vapo_wo_value_pretraining": NO_PRETRAINING,
    "vapo_wo_group_sampling": {"responses_per_prompt": 1},
    "ppo": NO_PRETRAINING | {"responses_per_prompt": 1},
    "orz": NO_PRETRAINING,
    "nemo_rl_ppo": NO_PRETRAINING | PLUS_MINUS_ONE | {"policy.epochs": 4, "critic.epochs": 4},
    "dapo": CRITIC_FREE | PLUS_MINUS_ONE | {"dynamic_sampling": True, "dynamic_sampling.max_rounds": 10, "policy.warmup_rollouts": 20},
    "vapo_review": {"critic.head": "mlp", "pretraining.head_only": True},
    "clip_cov": CRITIC_FREE | {"dynamic_sampling": True, "dynamic_sampling.max_rounds": 10},
    "kl_cov": CRITIC_FREE | {"dynamic_sampling": True, "dynamic_sampling.max_rounds": 10},
} | dict.fromkeys(("grpo", "grpo_process", "dr_grpo", "gspo", "cispo", "rloo", "raw_reward", "reinforce_pp"), CRITIC_FREE)


@pytest.mark.parametrize("preset", [path.stem for path in PRESETS])
def test_preset_settings_outside_the_algorithm(preset: str, tmp_path: Path) -> None:
    def settings(config: Config) -> dict[str, object]:
        reward, critic = config.reward, config.critic
        return {
            "critic": config.uses_critic,
            "pretraining": config.uses_critic and critic.value_pretraining.max_steps > 0,
            "responses_per_prompt": config.batch.responses_per_prompt,
            "dynamic_sampling": config.rollout.dynamic_sampling.enabled,
            "reward.scale": None if reward.scale is None else (tuple(reward.scale.source), tuple(reward.scale.target)),
            "reward.overlong": None if reward.overlong is None else (reward.overlong.cache, reward.overlong.penalty),
            "reward.truncated_factor": reward.truncated_factor,
            "dynamic_sampling.max_rounds": config.rollout.dynamic_sampling.max_rounds,
            "critic.head": critic.head if config.uses_critic else vapo.critic.head,
            "pretraining.head_only": critic.value_pretraining.head_only if config.uses_critic else False,
            "policy.epochs": config.policy.epochs,
            "critic.epochs": critic.epochs if config.uses_critic else vapo.critic.epochs,
            "policy.warmup_rollouts": config.policy.optimizer.warmup_rollouts,
        }

    vapo = _on_quickstart("vapo", tmp_path)
    expected = settings(vapo) | OTHER_DIFFERENCES.get(preset, {})
    assert settings(vapo)["critic"] and settings(vapo)["pretraining"] and settings(vapo)["reward.scale"] is None
    assert settings(_on_quickstart(preset, tmp_path)) == expected


@pytest.mark.parametrize("preset", ["vapo", "vapo_wo_group_sampling", "ppo"])
def test_a_preset_alone_draws_the_papers_batch(preset: str) -> None:
    required = [
        "run={dir: unused, steps: 1}",
        "model.path=unused",
        "batch.max_tokens_per_microbatch=8192",
        "data={train: [{kind: reasoning_gym, task: chain_sum, size: 1}], max_prompt_length: 1024}",
        "rollout.max_response_length=4096",
    ]
    batch = load_config(CONFIGS / "presets" / f"{preset}.yaml", required, check_paths=False).batch
    assert (batch.responses_per_step, batch.mini_batch_size, batch.updates_per_step) == (8192, 512, 16)
    assert batch.responses_per_prompt == (16 if preset == "vapo" else 1)


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
