"""Rules over several settings: each is broken by one case here and names its key, the values and a fix."""

import shutil
from pathlib import Path

import pytest

from tests.unit import broken_algorithm_rules, broken_layout_rules
from tests.unit.config_helpers import faults_of, load, write_base, write_model
from vapo_mcore.config.loading import _REASONS, all_keys
from vapo_mcore.config.rules import RULES

TP2 = ["parallel.world_size=2", "parallel.tensor_model_parallel_size=2"]
MIXTURE: dict[str, object] = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CORRECTED = "algorithm.policy_loss.importance_correction.kind=token_truncate"
BROKEN = [*broken_layout_rules.BROKEN, *broken_algorithm_rules.BROKEN]


@pytest.fixture(autouse=True)
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path)


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_horizon_below_one_token_is_refused(tokens: int, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (fault,) = faults_of(tmp_path, f"rollout.horizon.tokens={tokens}", CORRECTED)
    assert fault == f"rollout.horizon.tokens: {tokens} must be > 0"


@pytest.mark.parametrize(("name", "settings", "model", "key", "message"), BROKEN, ids=[f"{case[0]}-{i}" for i, case in enumerate(BROKEN)])
def test_broken_rule(name: str, settings: list[str], model: dict[str, object], key: str, message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", **model)
    faults = faults_of(tmp_path, *(setting.replace("{folder}", str(tmp_path)) for setting in settings))
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{key}: ")
    assert message in faults[0]


def test_every_rule_has_a_case() -> None:
    with_a_critic = {"loaded_critic_fits_layout_and_tokens", "engine_replay_needs_a_mixture_as_policy"}
    assert {rule.check.__name__ for rule in RULES} == {case[0] for case in BROKEN} | with_a_critic


def test_engine_replay_needs_a_mixture_as_policy(tmp_path: Path) -> None:
    """A mixture as critic beside a dense policy: the engine samples with the policy and chooses no experts."""
    write_model(tmp_path / "model")
    write_model(tmp_path / "critic", **MIXTURE)
    critic = ["critic.init=reward_model", f"critic.path={tmp_path}/critic", "rollout.engine=vllm"]
    (fault,) = faults_of(tmp_path, *critic, "model.router.replay=engine")
    assert fault.startswith("model.router.replay: ")
    assert "model.path is dense and only the critic is a mixture; use replay: trainer" in fault
    load(tmp_path, *critic, "model.router.replay=trainer")


@pytest.mark.parametrize(
    ("critic", "settings", "message"),
    [
        ({"vocab_size": 97}, [], "the critic's vocabulary has 97 entries, the policy's 96"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            TP2,
            "tensor_model_parallel_size = 2 does not divide the model's 3",
        ),
        ({"intermediate_size": 9}, TP2, "feed-forward size 9"),
        ({"num_hidden_layers": 3}, ["parallel.world_size=2", "parallel.pipeline_model_parallel_size=2"], "pipeline: the model's 3 layers"),
        ({"model_type": "gpt2"}, [], "model_type 'gpt2' is not supported"),
    ],
)
def test_loaded_critic_fits_layout_and_tokens(critic: dict[str, object], settings: list[str], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "critic", **critic)
    chosen = ["critic.init=reward_model", f"critic.path={tmp_path}/critic"]
    (fault,) = faults_of(tmp_path, *chosen, *settings)
    assert fault.startswith("critic.path: ")
    assert message in fault
    write_model(tmp_path / "critic", num_hidden_layers=2, hidden_size=64)
    load(tmp_path, *chosen, *settings)
    (fault,) = faults_of(tmp_path, "critic.init=reward_model", "critic.path=nowhere")
    assert "critic.path: model folder 'nowhere' does not exist" in fault


def test_a_critic_of_another_architecture_in_its_own_layout(tmp_path: Path) -> None:
    """Each model is checked in its layout alone, and the critic's keys are named."""
    write_model(tmp_path / "critic", num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=2)
    loaded = ["critic.init=reward_model", f"critic.path={tmp_path}/critic", "parallel.world_size=4"]
    config = load(tmp_path, *loaded, "parallel.tensor_model_parallel_size=4", "critic.parallel.pipeline_model_parallel_size=2")
    assert (config.critic_parallel.data_parallel_size, config.critic_parallel.world_size) == (2, 4)
    assert config.critic_parallel.timeout_minutes == config.parallel.timeout_minutes
    (fault,) = faults_of(tmp_path, *loaded, "critic.parallel.tensor_model_parallel_size=2")
    assert fault.startswith("critic.parallel.tensor_model_parallel_size: 2 does not divide the model's 3 attention heads")
    write_model(tmp_path / "model", **MIXTURE)
    load(tmp_path, *loaded, "parallel.expert_model_parallel_size=4", "critic.parallel={}")
    (fault,) = faults_of(tmp_path, *loaded, "parallel.expert_model_parallel_size=4", "critic.parallel.expert_model_parallel_size=2")
    assert fault.startswith("critic.parallel.expert_model_parallel_size: ") and "but the critic is dense; remove" in fault
    write_model(tmp_path / "critic", vocab_size=97)
    (fault,) = faults_of(tmp_path, *loaded, "critic.parallel={}")
    assert fault.startswith("critic.path: the critic's vocabulary has 97 entries, the policy's 96")


def test_models_of_a_checkpoint_of_a_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000004"
    for role in ("policy", "critic"):
        write_model(checkpoint / role / "weights" / "hf")
    (checkpoint / "manifest.json").write_text("{}")
    critic = ["critic.init=saved", f"critic.path={checkpoint}", "critic.value_pretraining.steps=0"]
    load(tmp_path, f"policy.path={checkpoint}", *critic)
    write_model(checkpoint / "policy" / "weights" / "hf", num_hidden_layers=2)
    (fault,) = faults_of(tmp_path, f"policy.path={checkpoint}")
    assert fault.startswith("policy.path: ") and "differs from that of model.path" in fault
    (fault,) = faults_of(tmp_path, f"policy.path={tmp_path}/model")
    assert fault.startswith("policy.path: ") and "is not a checkpoint of a run" in fault
    manifest = '{"stage": "rl", "step": 4, "optimizer_format": "", "updates": {"policy": 1}, "layout": {}, "metrics": {}, '
    (checkpoint / "manifest.json").write_text(manifest + '"package_version": "1", "files": {}, "format_version": 1}')
    shutil.rmtree(checkpoint / "critic")
    (fault,) = faults_of(tmp_path, *critic)
    assert fault.startswith("critic.path: ") and "a checkpoint of a run without a critic; it holds policy" in fault


def test_what_the_rules_allow(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    write_model(dense)
    load(tmp_path, "parallel.world_size=4", "parallel.tensor_model_parallel_size=4")  # 2 kv heads on 4 ranks: replicated
    load(tmp_path, "parallel.world_size=4", "parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2")
    load(tmp_path, "batch.mini_batch_size=128")
    load(tmp_path, "batch.mini_batch_size=100")  # not a divisor of the rollout
    load(tmp_path, "batch.max_tokens_per_microbatch=224")
    load(tmp_path, "critic.init=saved", f"critic.path={tmp_path}/model", "critic.value_pretraining.steps=0")
    load(tmp_path, "algorithm.advantage.estimator=reinforce", "batch.responses_per_prompt=1", "batch.mini_batch_size=16")
    load(tmp_path, "algorithm.advantage.estimator=reinforce_pp", "algorithm.advantage.whiten=minibatch", "algorithm.advantage.gamma=0.9")
    load(tmp_path, "algorithm.advantage.estimator=grpo", "algorithm.advantage.whiten=off", "algorithm.advantage.truncation=mask")
    load(tmp_path, "algorithm.advantage.estimator=reinforce_pp", "algorithm.kl={place: reward, kind: k1, coef: 0.1}")
    load(tmp_path, "algorithm.advantage.estimator=rloo", "algorithm.kl={place: reward, kind: k1, coef: 0.1}")
    load(tmp_path, "algorithm.advantage.estimator=rloo", "algorithm.kl={place: loss, coef: 0.1}")
    load(tmp_path, "algorithm.advantage={estimator: grpo_process, process: {normalise: batch, outcome: false}}")
    load(tmp_path, "eval.temperature=0")
    write_model(tmp_path / "model", **MIXTURE)
    load(tmp_path, "parallel.world_size=4", "parallel.expert_model_parallel_size=4")
    load(tmp_path, "model.router={replay: trainer, balance_coef: 0.01, z_coef: 0.001}", "diagnosis.busiest_expert.above=0.5")
    load(tmp_path, "model.router.z_coef=0.001", "rollout.old_logprobs=rollout", "diagnosis.first_step_kl=null")
    load(tmp_path, "parallel.world_size=2", "parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=1")
    both = ["parallel.world_size=2", "parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=2"]
    load(tmp_path, *both, "parallel.expert_tensor_parallel_size=1")  # each rank of the tensor-parallel group holds half of the experts
    load(tmp_path, "parallel.world_size=2", "parallel.expert_model_parallel_size=2", "critic.init=reward_model", f"critic.path={dense}")


def test_a_rule_is_not_applied_to_a_faulty_key(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "batch.mini_batch_size=999", "batch.prompts_per_step=0") == ["batch.prompts_per_step: 0 must be > 0"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.kl.place=[reward, loss]", "['reward', 'loss'] must be 'off', 'reward' or 'loss' (only one place: a penalty"),
        ("algorithm.kl.place=both", "'both' must be 'off', 'reward' or 'loss' (only one place: a penalty"),
        ("algorithm.advantage.lambda_policy.alpha=0", "0 must be > 0 (lambda is 1 - 1/(alpha l)"),
        ("algorithm.advantage.lambda_policy.alpha=-0.05", "-0.05 must be > 0 (lambda is 1 - 1/(alpha l)"),
        ("algorithm.policy_loss.clip_low=1.0", "1.0 must be < 1 (ratios are clipped at 1 - clip_low"),
        ("algorithm.policy_loss.clip_high=0", "0 must be > 0 (ratios are clipped at 1 + clip_high"),
        ("algorithm.policy_loss.dual_clip=1.0", "1.0 must be > 1 (it bounds ratios above 1"),
    ],
)
def test_impossible_settings_of_the_algorithm_are_refused_with_the_reason(setting: str, message: str, tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, setting)
    assert fault.startswith(f"{setting.split('=')[0]}: {message}")


def test_the_reasons_are_of_settings_that_exist() -> None:
    assert set(_REASONS) <= set(all_keys())
