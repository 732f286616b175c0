"""Settings that have no effect with others: each is refused by a case here, and gives way where it was inherited."""

from pathlib import Path

import pytest

from tests.unit.config_helpers import faults_of, load, write_base, write_child
from vapo_mcore.config import load_config
from vapo_mcore.config.applicability import INAPPLICABLE

UNTIL = "critic.value_pretraining.until="
CRITIC_FREE = "algorithm.advantage.estimator=grpo"
LAMBDA = "algorithm.advantage.lambda_policy"
CORRECTION = "algorithm.policy_loss.importance_correction"
PER_PROMPT = ["batch.prompts_per_step=128", "batch.responses_per_prompt=1"]
INTERLEAVED = ["parallel.world_size=2", "parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"]
WITHOUT_EFFECT = [
    ([CRITIC_FREE, "critic.epochs=2"], "critic.epochs"),
    ([CRITIC_FREE, "critic.optimizer.lr=1.0"], "critic.optimizer.lr"),
    ([CRITIC_FREE, f"{LAMBDA}.kind=length_adaptive"], f"{LAMBDA}.kind"),
    ([CRITIC_FREE, "algorithm.advantage.lambda_critic=1.0"], "algorithm.advantage.lambda_critic"),
    ([CRITIC_FREE, "algorithm.advantage.values=after_update"], "algorithm.advantage.values"),
    ([CRITIC_FREE, "algorithm.value_loss.clip=0.2"], "algorithm.value_loss.clip"),
    ([CRITIC_FREE, "algorithm.advantage.gamma=0.9"], "algorithm.advantage.gamma"),
    ([CRITIC_FREE, "algorithm.advantage.whiten=batch"], "algorithm.advantage.whiten"),
    ([CRITIC_FREE, "algorithm.advantage.truncation=bootstrap"], "algorithm.advantage.truncation"),
    (["algorithm.advantage.truncation=mask", "reward.truncated_factor=0.5"], "reward.truncated_factor"),
    (["reward.answer_region=anywhere", "reward.thinking_tags=['<a>', '<b>']"], "reward.thinking_tags"),
    ([CRITIC_FREE, "algorithm.advantage.process.normalise=batch"], "algorithm.advantage.process.normalise"),
    ([f"{LAMBDA}.value=0.9"], f"{LAMBDA}.value"),
    ([f"{LAMBDA}.kind=fixed", f"{LAMBDA}.alpha=0.1"], f"{LAMBDA}.alpha"),
    ([f"{LAMBDA}.min=0.1"], f"{LAMBDA}.min"),
    ([f"{LAMBDA}.max=0.9"], f"{LAMBDA}.max"),
    ([f"{CORRECTION}.cap=3.0"], f"{CORRECTION}.cap"),
    ([f"{CORRECTION}={{kind: token_truncate, low: 0.1}}"], f"{CORRECTION}.low"),
    (["parallel.equal_microbatches=true"], "parallel.equal_microbatches"),
    ([*INTERLEAVED, "parallel.equal_microbatches=true"], "parallel.equal_microbatches"),
    (["critic.parallel.equal_microbatches=true"], "critic.parallel.equal_microbatches"),
    (
        [
            "parallel.world_size=2",
            "critic.parallel={pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2, equal_microbatches: true}",
        ],
        "critic.parallel.equal_microbatches",
    ),
    ([CRITIC_FREE, "critic.parallel.tensor_model_parallel_size=1"], "critic.parallel.tensor_model_parallel_size"),
    (["algorithm.kl.coef=0.1"], "algorithm.kl.coef"),
    (["algorithm.kl.kind=k2"], "algorithm.kl.kind"),
    (["algorithm.kl.clamp=10.0"], "algorithm.kl.clamp"),
    (["rollout.engine=transformers", "rollout.vllm.kv_cache_gib=2.0"], "rollout.vllm.kv_cache_gib"),
    (["rollout.engine=transformers", "rollout.tensor_parallel_size=1"], "rollout.tensor_parallel_size"),
    (["rollout.dynamic_sampling.max_rounds=5"], "rollout.dynamic_sampling.max_rounds"),
    (["rollout.dynamic_sampling.on_exhausted=stop"], "rollout.dynamic_sampling.on_exhausted"),
    (["rollout.horizon={tokens: 40, critic: segments}", f"{CORRECTION}.kind=token_truncate"], "rollout.horizon.critic"),
    (["rollout.horizon={tokens: 40, train: segments, max_staleness: 1}"], "rollout.horizon.max_staleness"),
    (["rollout.horizon={tokens: 40, stale: drop}", f"{CORRECTION}.kind=token_truncate"], "rollout.horizon.stale"),
    (["critic={epochs: 2, updates_per_rollout: 3}"], "critic.epochs"),
    ([CRITIC_FREE, "algorithm.self_imitation={value_coef: 0.5}"], "algorithm.self_imitation.value_coef"),
    (["critic.path=/tmp"], "critic.path"),
    (["critic.init=reward_model", "critic.path={folder}/model", "critic.head_init=small"], "critic.head_init"),
    (["critic.init=reward_model", "critic.path={folder}/model", "critic.head=mlp"], "critic.head"),
    (["critic.init=reward_model", "critic.path={folder}/model", "critic.categorical={low: -1.5}"], "critic.categorical.low"),
    (["critic.init=reward_model", "critic.path={folder}/model", "critic.head_bias=mean_return"], "critic.head_bias"),
    ([UNTIL + "{value_loss_below: 0.1, max_steps: 9}", "critic.value_pretraining.steps=9"], "critic.value_pretraining.steps"),
    ([UNTIL + "{value_loss_below: 0.1, max_steps: 9, min_rise: 0.1}"], "critic.value_pretraining.until.min_rise"),
    ([UNTIL + "{patience: 2, max_steps: 9, window: 3}", "critic.probe={}"], "critic.value_pretraining.until.window"),
    (["critic.value_pretraining.steps=0", "critic.value_pretraining.lr=1.0"], "critic.value_pretraining.lr"),
    (["critic.value_pretraining.steps=0", "critic.value_pretraining.head_only=true"], "critic.value_pretraining.head_only"),
    (["data.chat_template=false", "data.system_prompt=be brief"], "data.system_prompt"),
    (["data.chat_template=false", "data.chat_template_kwargs={enable_thinking: false}"], "data.chat_template_kwargs.enable_thinking"),
    (["eval.temperature=0", "eval.top_p=0.5"], "eval.top_p"),
    (["checkpoint.best_metric=reward/mean"], "checkpoint.best_metric"),
    (["data.eval=[]", "export.best={metric: eval/x/avg@1}"], "export.best.metric"),
    (["run.wandb={project: p, mode: offline, api_key_variable: X}"], "run.wandb.api_key_variable"),
    (["data.eval=[]", "eval.every_steps=5"], "eval.every_steps"),
    (["algorithm.advantage.custom={function: a:f}"], "algorithm.advantage.custom.function"),
    ([CRITIC_FREE, "diagnosis.explained_variance.below=0.1"], "diagnosis.explained_variance.below"),
    ([CRITIC_FREE, "diagnosis.critic_stuck.below=0.1"], "diagnosis.critic_stuck.below"),
    (["algorithm.policy_loss={kind: custom, custom: {function: a:f}, clip_high: 0.1}"], "algorithm.policy_loss.clip_high"),
    (["algorithm.policy_loss.custom={function: a:f}"], "algorithm.policy_loss.custom.function"),
    (["algorithm.policy_loss={kind: cispo, clip_low: 0.1}"], "algorithm.policy_loss.clip_low"),
    (["algorithm.policy_loss={kind: cispo, dual_clip: 3.0}"], "algorithm.policy_loss.dual_clip"),
    (["algorithm.policy_loss={kind: kl_cov, clip_high: 0.1}"], "algorithm.policy_loss.clip_high"),
    (["algorithm.policy_loss.covariance.fraction=0.1"], "algorithm.policy_loss.covariance.fraction"),
    (["algorithm.policy_loss={kind: kl_cov, covariance: {low: 0.1}}"], "algorithm.policy_loss.covariance.low"),
    (["algorithm.policy_loss={kind: kl_cov, covariance: {high: 0.1}}"], "algorithm.policy_loss.covariance.high"),
    (["algorithm.policy_loss={kind: clip_cov, covariance: {kl_coef: 0.1}}"], "algorithm.policy_loss.covariance.kl_coef"),
    (["algorithm.positive_lm={coef: 0.0, skip_overlong: true}"], "algorithm.positive_lm.skip_overlong"),
    (["rollout.dynamic_sampling.keep=different_scores"], "rollout.dynamic_sampling.keep"),
    ([CRITIC_FREE, "diagnosis.value_loss_rising.rise=3.0"], "diagnosis.value_loss_rising.rise"),
    ([f"{LAMBDA}.kind=fixed", "diagnosis.lambda_zero.above=0.9"], "diagnosis.lambda_zero.above"),
    ([*PER_PROMPT, "diagnosis.uniform_groups.above=0.5"], "diagnosis.uniform_groups.above"),
    (["rollout.old_logprobs=rollout", "diagnosis.first_step_kl.above=0.5"], "diagnosis.first_step_kl.above"),
    (["run.steps=0", "export.at_end=true"], "export.at_end"),
]
CUSTOM_CRITIC = "algorithm.advantage={estimator: custom, custom: {function: a:f, critic: true}, lambda_policy: {alpha: 0.9}}"


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path)


@pytest.mark.parametrize(("settings", "key"), WITHOUT_EFFECT, ids=[case[1] + f"-{i}" for i, case in enumerate(WITHOUT_EFFECT)])
def test_setting_without_effect_is_refused(settings: list[str], key: str, tmp_path: Path) -> None:
    faults = faults_of(tmp_path, *(setting.replace("{folder}", str(tmp_path)) for setting in settings))
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{key}: ")
    assert "has no effect with" in faults[0]


def test_a_factor_on_masked_responses_counts_in_their_group(tmp_path: Path) -> None:
    config = load(tmp_path, CRITIC_FREE, "algorithm.advantage.truncation=mask", "reward.truncated_factor=0.5")
    assert config.reward.truncated_factor == 0.5


def test_every_inapplicable_setting_has_a_case() -> None:
    tried = [key for _, key in WITHOUT_EFFECT]
    for entry in INAPPLICABLE:
        for name in entry.keys:
            assert any(key == name or key.startswith(name + ".") for key in tried), name


def test_an_estimator_of_the_user_s_has_no_lambda_of_the_policy(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, CUSTOM_CRITIC)
    assert fault.startswith(f"{LAMBDA}.alpha: 0.9 has no effect with algorithm.advantage.estimator = 'custom'")


def test_inherited_settings_give_way_to_a_later_switch(tmp_path: Path) -> None:
    write_child(
        tmp_path, "critic: {epochs: 2, optimizer: {lr: 1.0}}\nalgorithm: {advantage: {lambda_policy: {alpha: 0.1}, whiten: batch}}\n"
    )
    assert load_config(tmp_path / "child.yaml").critic.epochs == 2
    critic_free = load_config(tmp_path / "child.yaml", [CRITIC_FREE])
    assert (critic_free.critic.epochs, critic_free.algorithm.advantage.whiten) == (1, "off")
    fixed = load_config(tmp_path / "child.yaml", [f"{LAMBDA}.kind=fixed", f"{LAMBDA}.value=0.9"])
    assert (fixed.algorithm.advantage.lambda_policy.value, fixed.algorithm.advantage.lambda_policy.alpha) == (0.9, 0.05)
    assert fixed.critic.epochs == 2


def test_dr_grpo_is_whitened_only_if_asked(tmp_path: Path) -> None:
    """Whitening makes it REINFORCE++-baseline: the ``batch`` of the file with the other estimator must not be inherited."""
    write_child(tmp_path, "algorithm: {advantage: {whiten: batch}}\n")
    plain = load_config(tmp_path / "child.yaml", ["algorithm.advantage.estimator=dr_grpo"])
    assert plain.algorithm.advantage.whiten == "off"
    asked = load_config(tmp_path / "child.yaml", ["algorithm.advantage.estimator=dr_grpo", "algorithm.advantage.whiten=batch"])
    assert asked.algorithm.advantage.whiten == "batch"


def test_given_after_the_switch_is_a_contradiction(tmp_path: Path) -> None:
    write_child(tmp_path, "algorithm: {advantage: {estimator: grpo}}\n", "grpo.yaml")
    (fault,) = faults_of(tmp_path, "critic.epochs=2", file="grpo.yaml")
    assert fault.startswith("critic.epochs: 2 has no effect with algorithm.advantage.estimator = 'grpo'")
    write_child(tmp_path, "algorithm: {advantage: {estimator: grpo}}\ncritic: {epochs: 2}\n", "same.yaml")
    assert faults_of(tmp_path, file="same.yaml") == [fault]


def test_a_faulty_inherited_setting_that_gives_way_is_no_fault(tmp_path: Path) -> None:
    write_child(tmp_path, "critic: {epochs: 0}\n")
    assert faults_of(tmp_path, file="child.yaml") == ["critic.epochs: 0 must be > 0"]
    assert not load_config(tmp_path / "child.yaml", [CRITIC_FREE]).uses_critic
