"""Rules over several settings: each is broken by one case here and names its key, the values and a fix."""

import shutil
from pathlib import Path

import pytest

from tests.unit.config_helpers import faults_of, load, write_base, write_model
from vapo_mcore.config.loading import _REASONS, all_keys
from vapo_mcore.config.rules import RULES

TP2 = ["parallel.world_size=2", "parallel.tensor_model_parallel_size=2"]
MIXTURE: dict[str, object] = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
UNTIL = "critic.value_pretraining.until="
CORRECTED = "algorithm.policy_loss.importance_correction.kind=token_truncate"
HORIZON = ["rollout.horizon.tokens=40", CORRECTED]

# (name of the rule, settings, changes of the model, key of the fault, what its message contains)
BROKEN = [
    (
        "router_settings_need_a_mixture",
        ["model.router={replay: trainer, balance_coef: 0.01, z_coef: 0.001}", "diagnosis.busiest_expert.above=0.5"],
        {},
        "model.router",
        "replay = trainer and balance_coef = 0.01 and z_coef = 0.001 and diagnosis.busiest_expert: of routers, but the models are dense",
    ),
    (
        "router_replay_needs_the_log_prob_pass",
        ["model.router.replay=trainer", "rollout.old_logprobs=rollout"],
        MIXTURE,
        "model.router.replay",
        "rollout.old_logprobs = 'rollout' omits that pass; use rollout.old_logprobs: recompute, or replay: off",
    ),
    (
        "balance_loss_needs_router_replay",
        ["model.router.balance_coef=0.01"],
        MIXTURE,
        "model.router.balance_coef",
        "0.01 weighs each expert by its share of the mini-batch's tokens, which must be known before its first micro-batch: only "
        "model.router.replay = 'trainer'",
    ),
    (
        "world_size_is_the_product_of_degrees",
        ["parallel.world_size=6", "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"],
        {},
        "parallel.world_size",
        "tensor 2 x pipeline 2 x context 1 = 4 processes; use a multiple of 4",
    ),
    (
        "world_size_is_the_product_of_degrees",
        ["parallel.world_size=4", "parallel.data_parallel_size=2"],
        {},
        "parallel.world_size",
        "4 is not tensor 1 x pipeline 1 x context 1 x data 2 = 2; with these degrees data_parallel_size is 4",
    ),
    ("sequence_parallel_needs_tensor_parallel", ["parallel.sequence_parallel=true"], {}, "parallel.sequence_parallel", "= 1; remove it"),
    (
        "virtual_pipeline_needs_pipeline",
        ["parallel.virtual_pipeline_model_parallel_size=2"],
        {},
        "parallel.virtual_pipeline_model_parallel_size",
        "pipeline_model_parallel_size = 1; use null",
    ),
    (
        "expert_degrees_fill_the_world",
        ["parallel.world_size=2", "parallel.expert_model_parallel_size=4"],
        MIXTURE,
        "parallel.expert_model_parallel_size",
        "2 processes cannot be split into copies of the experts over expert-tensor 1 x expert 4 x pipeline 1 = 4 processes",
    ),
    (
        "experts_split_over_their_ranks",
        ["parallel.world_size=2", "parallel.expert_model_parallel_size=2"],
        {},
        "parallel.expert_model_parallel_size",
        "expert_model_parallel_size = 2 split the experts of a mixture, but the models are dense; remove",
    ),
    (
        "experts_split_over_their_ranks",
        ["parallel.world_size=3", "parallel.expert_model_parallel_size=3"],
        MIXTURE,
        "parallel.expert_model_parallel_size",
        "3 ranks do not divide the model's 8 experts; use 1, 2, 4, 8",
    ),
    (
        "experts_split_over_their_ranks",
        [*TP2, "rollout.tensor_parallel_size=1"],
        MIXTURE | {"moe_intermediate_size": 33},
        "parallel.expert_model_parallel_size",
        "expert-tensor 2 does not divide the size 33 of an expert",
    ),
    (
        "experts_split_over_their_ranks",
        [*TP2, "parallel.expert_tensor_parallel_size=1"],
        MIXTURE,
        "parallel.expert_model_parallel_size",
        "Megatron would not add up the experts' gradients of tensor-parallel ranks",
    ),
    (
        "mixtures_with_tensor_parallelism_are_sequence_parallel",
        [*TP2, "parallel.sequence_parallel=false"],
        MIXTURE,
        "parallel.sequence_parallel",
        "tensor_model_parallel_size = 2; use true (the default)",
    ),
    (
        "rollout_tensor_parallel_splits_experts",
        [*TP2, "parallel.expert_tensor_parallel_size=1", "parallel.expert_model_parallel_size=2"],
        MIXTURE | {"moe_intermediate_size": 33},
        "rollout.tensor_parallel_size",
        "2 ranks of a replica do not divide the size 33 of an expert (moe_intermediate_size); use 1, 3, 11, 33",
    ),
    (
        "heads_split_over_tensor_parallel",
        TP2,
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        "parallel.tensor_model_parallel_size",
        "2 does not divide the model's 3 attention heads; use 1, 3",
    ),
    (
        "heads_split_over_tensor_parallel",
        ["parallel.world_size=4", "parallel.tensor_model_parallel_size=4"],
        {"num_attention_heads": 12, "num_key_value_heads": 6},
        "parallel.tensor_model_parallel_size",
        "4 neither divides the model's 6 key-value heads nor is a multiple of them",
    ),
    ("ffn_splits_over_tensor_parallel", TP2, {"intermediate_size": 261}, "parallel.tensor_model_parallel_size", "feed-forward size 261"),
    (
        "layers_split_over_pipeline",
        ["parallel.world_size=3", "parallel.pipeline_model_parallel_size=3"],
        {},
        "parallel.pipeline_model_parallel_size",
        "the model's 4 layers do not split evenly over 3 pipeline ranks; use a product among 1, 2, 4",
    ),
    (
        "layers_split_over_pipeline",
        [
            "parallel.world_size=2",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.virtual_pipeline_model_parallel_size=3",
        ],
        {},
        "parallel.pipeline_model_parallel_size",
        "2 pipeline ranks x 3 virtual chunks = 6 stages",
    ),
    (
        "rollout_replicas_fill_the_world",
        ["parallel.world_size=2", "rollout.tensor_parallel_size=4"],
        {},
        "rollout.tensor_parallel_size",
        "4 does not divide parallel.world_size = 2",
    ),
    (
        "rollout_tensor_parallel_splits_heads",
        ["parallel.world_size=2", "rollout.tensor_parallel_size=2"],
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        "rollout.tensor_parallel_size",
        "2 does not divide the model's 3 attention heads",
    ),
    (
        "mini_batch_fits_the_rollout",
        ["batch.mini_batch_size=129"],
        {},
        "batch.mini_batch_size",
        "prompts_per_step x responses_per_prompt = 16 x 8 = 128 responses; use at most 128",
    ),
    (
        "longest_sequence_fits_a_microbatch",
        ["batch.max_tokens_per_microbatch=223"],
        {},
        "batch.max_tokens_per_microbatch",
        "64 + 160 = 224; use at least 224",
    ),
    (
        "longest_sequence_fits_a_microbatch",
        [
            "batch.max_tokens_per_microbatch=225",
            "data.max_prompt_length=65",
            "parallel.world_size=4",
            "parallel.tensor_model_parallel_size=2",
            "parallel.context_parallel_size=2",
        ],
        {},
        "batch.max_tokens_per_microbatch",
        "65 + 160 = 225, padded to 232 (a multiple of 8 for TP/CP); use at least 232",
    ),
    (
        "longest_sequence_fits_the_model",
        [],
        {"max_position_embeddings": 200},
        "rollout.max_response_length",
        "64 + 160 = 224 tokens, above the model's max_position_embeddings = 200",
    ),
    (
        "longest_sequence_fits_the_model",
        [],
        {
            "max_position_embeddings": 128,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
        "rollout.max_response_length",
        "max_position_embeddings = 128; config.json scales RoPE, so set max_position_embeddings there to the scaled length",
    ),
    (
        "vllm_batched_tokens_hold_its_sequences",
        ["rollout.vllm.max_num_batched_tokens=64"],
        {},
        "rollout.vllm.max_num_batched_tokens",
        "below rollout.vllm.max_num_seqs = 256",
    ),
    (
        "train_sources_have_distinct_names",
        ["data.train.1={kind: reasoning_gym, task: chain_sum, name: train, size: 3}"],
        {},
        "data.train",
        "several sources are named 'train'",
    ),
    ("eval_sources_have_distinct_names", ["data.eval.1={kind: reasoning_gym, task: chain_sum, size: 3}"], {}, "data.eval", "'chain_sum'"),
    ("train_weights_share_between_sources", ["data.train.0.weight=2.0"], {}, "data.train", "weight = 2.0 of 'train' has no effect"),
    ("eval_sources_have_no_weight", ["data.eval.0.weight=2.0"], {}, "data.eval", "weight of 'chain_sum' has no effect"),
    ("training_samples_the_whole_distribution", ["rollout.top_p=0.9"], {}, "rollout.top_p", "0.9 truncates the distribution"),
    (
        "observation_format_has_one_place",
        ["rollout.environment={name: calculator, format: answer, max_observation_length: 10}"],
        {},
        "rollout.environment.format",
        "'answer' must contain {observation} exactly once",
    ),
    (
        "longest_sequence_fits_a_microbatch",
        ["rollout.environment={name: calculator, max_turns: 3, max_observation_length: 10}", "batch.max_tokens_per_microbatch=224"],
        {},
        "batch.max_tokens_per_microbatch",
        "64 + 160 + 2 x 10 = 244",
    ),
    ("training_samples_all_tokens", ["rollout.top_k=50"], {}, "rollout.top_k", "50 truncates the distribution"),
    (
        "dynamic_sampling_needs_groups",
        ["rollout.dynamic_sampling.enabled=true", "batch.responses_per_prompt=1", "batch.mini_batch_size=16"],
        {},
        "rollout.dynamic_sampling.enabled",
        "batch.responses_per_prompt = 1",
    ),
    (
        "in_flight_holds_a_step",
        [*HORIZON, "rollout.horizon.in_flight=120"],
        {},
        "rollout.horizon.in_flight",
        "120 open responses are fewer than those of a step, batch.prompts_per_step x batch.responses_per_prompt = 16 x 8 = 128; use at",
    ),
    (
        "in_flight_holds_a_step",
        [*HORIZON, "rollout.horizon.in_flight=130"],
        {},
        "rollout.horizon.in_flight",
        "130 is not a multiple of batch.responses_per_prompt = 8: a new prompt opens 8 responses at once; use 128 or 136",
    ),
    (
        "segment_limit_is_reached",
        [*HORIZON, "rollout.horizon.max_segments=4"],
        {},
        "rollout.horizon.max_segments",
        "with rollout.horizon.tokens = 40 the longest response, rollout.max_response_length = 160, has 4 segments",
    ),
    (
        "some_tokens_are_too_old",
        [*HORIZON, "rollout.horizon.max_staleness=3"],
        {},
        "rollout.horizon.max_staleness",
        "a response has at most 4 segments (rollout.horizon.tokens = 40, rollout.max_response_length = 160, rollout.horizon.max_segments = "
        "null) and trains with the last, so its oldest tokens are 3 steps old; use at most 2, or remove it",
    ),
    (
        "some_tokens_are_too_old",
        [*HORIZON, "rollout.horizon.max_segments=2", "rollout.horizon.max_staleness=1"],
        {},
        "rollout.horizon.max_staleness",
        "a response has at most 2 segments",
    ),
    (
        "horizon_draws_no_groups_again",
        [*HORIZON, "rollout.dynamic_sampling.enabled=true"],
        {},
        "rollout.horizon",
        "cannot be combined with rollout.dynamic_sampling.enabled = true: whether a group is dropped is known only when all",
    ),
    (
        "horizon_recomputes_logprobs",
        ["rollout.horizon.tokens=40", "rollout.old_logprobs=rollout"],
        {},
        "rollout.horizon",
        "needs rollout.old_logprobs = 'recompute': tokens of earlier steps have two log-probs",
    ),
    (
        "horizon_corrects_older_tokens",
        ["rollout.horizon.tokens=40"],
        {},
        "rollout.horizon",
        "needs algorithm.policy_loss.importance_correction.kind other than 'off': tokens of earlier steps were sampled by older policies",
    ),
    *(
        (
            "segments_have_a_critic",
            ["rollout.horizon={tokens: 40, train: segments}", f"algorithm.advantage.estimator={estimator}"],
            {},
            "rollout.horizon.train",
            f"'segments' cannot be used with algorithm.advantage.estimator = {estimator!r}, which {reason}",
        )
        for estimator, reason in (("rloo", "compares the rewards of a prompt's responses"), ("reinforce", "has no critic, whose value"))
    ),
    (
        "segments_train_before_a_truncation",
        ["rollout.horizon={tokens: 40, train: segments}", "algorithm.advantage.truncation=mask"],
        {},
        "rollout.horizon.train",
        "when a response is truncated, its earlier segments have trained already",
    ),
    (
        "segments_have_no_kl_in_the_reward",
        ["rollout.horizon={tokens: 40, train: segments}", "algorithm.kl={place: reward, coef: 0.1}"],
        {},
        "rollout.horizon.train",
        "the penalty of its earlier segments belongs to policies that are gone",
    ),
    (
        "segments_are_no_responses",
        ["rollout.horizon={tokens: 40, train: segments}", "algorithm.policy_loss.kind=gspo"],
        {},
        "rollout.horizon.train",
        "'gspo', whose ratio is that of the whole response",
    ),
    (
        "imitation_keeps_whole_responses",
        ["rollout.horizon={tokens: 40, train: segments, critic: segments}", "algorithm.self_imitation={top_k: 2}"],
        {},
        "rollout.horizon.critic",
        "'segments' cannot be used with algorithm.self_imitation, which keeps whole responses",
    ),
    (
        "horizon_leaves_a_mean_return",
        [*HORIZON, "critic.head_bias=mean_return", "critic.value_pretraining.steps=0"],
        {},
        "rollout.horizon",
        "cannot set critic.head_bias = 'mean_return' without value pretraining",
    ),
    (
        "best_export_has_an_evaluation_metric",
        ["export.best={metric: eval/chain_sum/pass@1}"],
        {},
        "export.best.metric",
        "'eval/chain_sum/pass@1' is not a metric of the evaluations; choose eval/chain_sum/avg@1 (or ci_low, ci_high, length_mean,",
    ),
    (
        "best_export_has_evaluations",
        ["export.best={metric: eval/chain_sum/avg@1}", "eval.at_end=false"],
        {},
        "export.best",
        "is never exported: eval.every_steps = 0 and eval.at_end = false",
    ),
    (
        "dumped_steps_are_made",
        ["run.dump_steps=[6, 7, 9]"],
        {},
        "run.dump_steps",
        "7, 9 can have no effect: the run ends after run.steps = 6; remove these steps",
    ),
    (
        "some_step_is_dumped",
        ["run.dump_every_steps=7"],
        {},
        "run.dump_every_steps",
        "7 can have no effect: no step up to run.steps = 6 is a multiple of it",
    ),
    ("best_checkpoint_has_a_metric", ["checkpoint.keep_best=2"], {}, "checkpoint.best_metric", "is required with checkpoint.keep_best = 2"),
    (
        "best_checkpoint_has_a_metric",
        ["checkpoint={keep_best: 1, best_metric: eval/math/avg@1}"],
        {},
        "checkpoint.best_metric",
        "'eval/math/avg@1' is never measured; choose one of reward/mean, eval/chain_sum/avg@1",
    ),
    ("reward_scale_has_a_source_interval", ["reward.scale.source=[1, 1]"], {}, "reward.scale.source", "low < high"),
    ("reward_scale_rewards_what_is_right", ["reward.scale.target=[1, -1]"], {}, "reward.scale.target", "[1.0, -1.0] must be"),
    (
        "model_has_no_attention_output_bias",
        [],
        {"model_type": "llama", "attention_bias": True},
        "model.path",
        "has a bias on the attention output",
    ),
    (
        "overlong_cache_is_inside_the_response",
        ["reward.overlong.cache=160"],
        {},
        "reward.overlong.cache",
        "below rollout.max_response_length = 160",
    ),
    (
        "categorical_head_has_a_range",
        ["critic.categorical={low: 1.0, high: 1.0}"],
        {},
        "critic.categorical",
        "low = 1 must be below high = 1",
    ),
    (
        "categorical_head_has_a_range",
        ["critic.categorical={low: -0.2, high: 1.2}", "reward.scale={source: [0.0, 1.0], target: [-1.0, 1.0]}"],
        {},
        "critic.categorical",
        "[-0.2, 1.2] does not contain the rewards, which reach from -1 to 1; give bounds around them, such as low: -1.2 and high: 1.2",
    ),
    (
        "value_clip_is_of_a_scalar_head",
        ["critic.categorical={low: -0.2, high: 1.2}", "algorithm.value_loss.clip=0.2"],
        {},
        "algorithm.value_loss.clip",
        "this critic's is categorical; use null",
    ),
    (
        "covariances_have_a_range",
        ["algorithm.policy_loss={kind: clip_cov, covariance: {low: 2.0, high: 2.0}}"],
        {},
        "algorithm.policy_loss.covariance.low",
        "2.0 must be below high = 2.0",
    ),
    ("dropout_is_of_an_mlp_head", ["critic.head_dropout=0.1"], {}, "critic.head_dropout", "this critic's head is linear"),
    (
        "group_estimators_need_groups",
        ["algorithm.advantage.estimator=grpo", "batch.responses_per_prompt=1", "batch.mini_batch_size=16"],
        {},
        "batch.responses_per_prompt",
        "every advantage of algorithm.advantage.estimator = 'grpo' zero",
    ),
    (
        "length_adaptive_lambda_rises_above_zero",
        ["algorithm.advantage.lambda_policy.alpha=0.00625"],
        {},
        "algorithm.advantage.lambda_policy.alpha",
        "0 up to l = 1/alpha = 160 tokens, but rollout.max_response_length = 160",
    ),
    (
        "varlen_attention_has_no_context_parallelism",
        ["model.attention=varlen", "model.dtype=bfloat16", "parallel.world_size=2", "parallel.context_parallel_size=2"],
        {},
        "model.attention",
        "parallel.context_parallel_size = 2; use te, sdpa or auto",
    ),
    (
        "varlen_attention_is_for_bfloat16",
        ["model.attention=varlen", "model.dtype=float32"],
        {},
        "model.attention",
        "supports only bfloat16, but model.dtype = float32; use sdpa, auto or dtype bfloat16",
    ),
    (
        "greedy_evaluation_takes_one_sample",
        ["eval.temperature=0", "eval.samples_per_prompt=4"],
        {},
        "eval.samples_per_prompt",
        "are identical",
    ),
    (
        "sigmoid_lambda_has_a_range",
        ["algorithm.advantage.lambda_policy={kind: sigmoid, min: 0.9, max: 0.9}"],
        {},
        "algorithm.advantage.lambda_policy.min",
        "0.9 must be below max = 0.9",
    ),
    (
        "importance_correction_needs_recomputed_logprobs",
        ["rollout.old_logprobs=rollout", "algorithm.policy_loss.importance_correction.kind=token_truncate"],
        {},
        "algorithm.policy_loss.importance_correction.kind",
        "use 'recompute'",
    ),
    (
        "importance_mask_has_a_range",
        ["algorithm.policy_loss.importance_correction={kind: token_mask, low: 3.0}"],
        {},
        "algorithm.policy_loss.importance_correction.low",
        "3.0 must be below cap = 2.0",
    ),
    ("advantage_clip_is_an_interval", ["algorithm.advantage.clip=[0.5, 5]"], {}, "algorithm.advantage.clip", "from below 0 to above 0"),
    ("kl_loss_has_a_gradient", ["algorithm.kl={place: loss, kind: k1, coef: 0.1}"], {}, "algorithm.kl.kind", "expected gradient of zero"),
    (
        "kl_in_the_reward_reaches_the_advantages",
        ["algorithm.advantage.estimator=grpo", "algorithm.kl={place: reward, kind: k1, coef: 0.1}"],
        {},
        "algorithm.kl.place",
        "'reward' has no effect with algorithm.advantage.estimator = 'grpo'",
    ),
    ("kl_has_a_coefficient", ["algorithm.kl={place: reward}"], {}, "algorithm.kl.coef", "reference model without using it"),
    ("custom_loss_is_named", ["algorithm.policy_loss.kind=custom"], {}, "algorithm.policy_loss.custom", "is required with"),
    ("custom_estimator_is_named", ["algorithm.advantage.estimator=custom"], {}, "algorithm.advantage.custom", "is required with"),
    (
        "loss_terms_have_distinct_names",
        ["algorithm.loss_terms=[{name: a, function: a:f, coef: 1.0}, {name: a, function: a:g, coef: 1.0}]"],
        {},
        "algorithm.loss_terms",
        "several terms are named 'a'",
    ),
    (
        "halting_rules_are_watched",
        ["diagnosis={clip_fraction: null, halt_on: [clip_fraction]}"],
        {},
        "diagnosis.halt_on",
        "'clip_fraction' can never hold: diagnosis.clip_fraction is null; remove it",
    ),
    (
        "halting_rules_are_watched",
        ["algorithm.advantage.estimator=grpo", "diagnosis.halt_on=[entropy_collapse, value_loss_rising]"],
        {},
        "diagnosis.halt_on",
        "'value_loss_rising' can never hold: there is no critic; remove it",
    ),
    ("critic_init_has_a_path", ["critic.init=reward_model"], {}, "critic.path", "is required with critic.init = 'reward_model'"),
    (
        "saved_critic_says_whether_to_pretrain",
        ["critic.init=saved", "critic.path={folder}/model"],
        {},
        "critic.value_pretraining.steps",
        "defaults to 50, but critic.init = 'saved'",
    ),
    (
        "no_steps_is_value_pretraining",
        ["run.steps=0", "critic.value_pretraining.steps=0"],
        {},
        "run.steps",
        "0 leaves nothing to do",
    ),
    ("until_has_a_threshold", [UNTIL + "{max_steps: 10}"], {}, "critic.value_pretraining.until", "needs value_loss_below"),
    (
        "until_with_a_probe_has_one",
        [UNTIL + "{max_steps: 10, patience: 3}"],
        {},
        "critic.value_pretraining.until",
        "patience read the explained variance of critic.probe, which is null; set critic.probe: {}",
    ),
    (
        "probe_has_held_out_prompts",
        ["data.eval=[]", "critic.probe={}"],
        {},
        "critic.probe",
        "takes its prompts from data.eval, which is empty",
    ),
    (
        "until_window_fits",
        [UNTIL + "{max_steps: 4, value_loss_below: 0.1, window: 5}"],
        {},
        "critic.value_pretraining.until.window",
        "consecutive steps do not fit in max_steps = 4",
    ),
]


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
    assert {rule.check.__name__ for rule in RULES} == {case[0] for case in BROKEN} | {"loaded_critic_fits_layout_and_tokens"}


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
