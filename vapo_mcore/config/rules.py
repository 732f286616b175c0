"""Rules over several settings, one named function each: it returns what is wrong, with values and a fix, or None.

``@rule`` lists the keys that a function reads; the fault is reported at the first. A rule is skipped when one of its keys
is itself faulty, so that one mistake is reported once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.config.layers import Fault, overlap
from vapo_mcore.config.schema import GROUP_ESTIMATORS, Config, FileSource, ParallelConfig
from vapo_mcore.errors import CheckpointError


@dataclass(frozen=True)
class Subject:
    """What the rules look at: the config, and the architectures of the model and of a loaded critic if they could be read."""

    config: Config
    architecture: ModelArchitecture | None
    critic_architecture: ModelArchitecture | None
    given: Callable[[str], bool]  # whether a dotted key (or one below it) was set in a file or an override


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    check: Callable[[Subject], str | None]
    needs_architecture: bool


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Callable[[Subject], str | None]], Callable[[Subject], str | None]]:
    def register(check: Callable[[Subject], str | None]) -> Callable[[Subject], str | None]:
        RULES.append(Rule(keys, check, "model.path" in keys))
        return check

    return register


def broken_rules(subject: Subject, faulty: set[str]) -> Iterator[Fault]:
    """Faults of all rules none of whose keys is in ``faulty`` (dotted keys; a section covers what is below it)."""
    for entry in RULES:
        if entry.needs_architecture and subject.architecture is None:
            continue
        if any(overlap(key, bad) for key in entry.keys for bad in faulty):
            continue
        message = entry.check(subject)
        if message:
            yield Fault(entry.keys[0], message)


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_model(key: str, folder: str, faults: list[Fault]) -> ModelArchitecture | None:
    """The architecture of a model folder; what is wrong with the folder is among the faults, at ``key``."""
    try:
        architecture = read_architecture(folder)
    except CheckpointError as error:
        faults.append(Fault(key, str(error)))
        return None
    if not any(Path(folder, name).is_file() for name in _WEIGHTS):
        pickled = sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in Path(folder).glob(f"*.{suffix}"))
        hint = f"; {pickled[0]} is a pickle, which can run code and is refused: convert it to safetensors" if pickled else ""
        faults.append(Fault(key, f"{folder!r} has no weights: neither {' nor '.join(_WEIGHTS)}{hint}"))
    if key == "model.path" and not any(Path(folder, name).is_file() for name in _TOKENIZERS):
        faults.append(Fault(key, f"{folder!r} has no tokenizer ({', '.join(_TOKENIZERS[:-1])} or {_TOKENIZERS[-1]})"))
    return architecture


def missing_paths(config: Config) -> Iterator[Fault]:
    """Data files that the run reads and that do not exist."""
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, split)):
            if isinstance(source, FileSource) and not os.path.isfile(source.path):
                yield Fault(f"data.{split}.{index}.path", f"no such file: {source.path!r} (relative to {str(Path.cwd())!r})")


# --- layout -----------------------------------------------------------------------------------------------------------

_DEGREES = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.data_parallel_size",
)


@rule("parallel.world_size", *_DEGREES)
def world_size_is_the_product_of_degrees(s: Subject) -> str | None:
    p = s.config.parallel
    tp, pp, cp, dp = (
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.context_parallel_size,
        p.data_parallel_size,
    )
    if p.world_size % (tp * pp * cp):
        return (
            f"{p.world_size} processes cannot be split into model replicas of tensor {tp} x pipeline {pp} x context {cp} "
            f"= {tp * pp * cp} processes; use a multiple of {tp * pp * cp}"
        )
    if p.world_size != tp * pp * cp * dp:
        return (
            f"{p.world_size} is not tensor {tp} x pipeline {pp} x context {cp} x data {dp} = {tp * pp * cp * dp}; "
            f"with these degrees data_parallel_size is {p.world_size // (tp * pp * cp)} (leave it out to derive it)"
        )
    return None


@rule("parallel.sequence_parallel", "parallel.tensor_model_parallel_size")
def sequence_parallel_needs_tensor_parallel(s: Subject) -> str | None:
    p = s.config.parallel
    if p.sequence_parallel and p.tensor_model_parallel_size == 1:
        return "true splits activations over tensor-parallel ranks, but tensor_model_parallel_size = 1; remove it or raise that"
    return None


@rule("parallel.virtual_pipeline_model_parallel_size", "parallel.pipeline_model_parallel_size")
def virtual_pipeline_needs_pipeline(s: Subject) -> str | None:
    p = s.config.parallel
    chunks = p.virtual_pipeline_model_parallel_size
    if chunks is not None and p.pipeline_model_parallel_size == 1:
        return f"{chunks} interleaves {chunks} chunks on each pipeline rank, but pipeline_model_parallel_size = 1; use null"
    return None


@rule("parallel.expert_model_parallel_size")
def expert_parallel_is_for_moe(s: Subject) -> str | None:
    degree = s.config.parallel.expert_model_parallel_size
    if degree != 1:
        return f"{degree} needs a mixture-of-experts model, which training does not support yet; use 1"
    return None


@rule("model.path")
def model_is_dense(s: Subject) -> str | None:
    assert s.architecture is not None
    if s.architecture.is_moe:
        return (
            f"{s.config.model.path!r} is a mixture-of-experts model ({s.architecture.family}, {s.architecture.num_experts} experts); "
            "training refuses these until a small one has been shown to give the same step in every layout; use a dense model"
        )
    return None


@rule("model.path")
def model_has_no_attention_output_bias(s: Subject) -> str | None:
    assert s.architecture is not None
    if s.architecture.attention_output_bias:
        return f"{s.config.model.path!r} has a bias on the attention output (llama's attention_bias), which training does not support"
    return None


@rule("parallel.tensor_model_parallel_size", "model.path")
def heads_split_over_tensor_parallel(s: Subject) -> str | None:
    assert s.architecture is not None
    return _heads_problem(s.architecture, s.config.parallel.tensor_model_parallel_size)


@rule("parallel.tensor_model_parallel_size", "model.path")
def ffn_splits_over_tensor_parallel(s: Subject) -> str | None:
    assert s.architecture is not None
    return _ffn_problem(s.architecture, s.config.parallel.tensor_model_parallel_size)


@rule("parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size", "model.path")
def layers_split_over_pipeline(s: Subject) -> str | None:
    assert s.architecture is not None
    return _layers_problem(s.architecture, s.config.parallel)


@rule("critic.path", "critic.init", "model.path", "parallel", "algorithm.advantage.estimator")
def loaded_critic_fits_layout_and_tokens(s: Subject) -> str | None:
    """Policy and critic share one layout and read the same tokens."""
    policy, critic, parallel = s.architecture, s.critic_architecture, s.config.parallel
    if policy is None or critic is None:
        return None
    if critic.is_moe:
        return f"{s.config.critic.path!r} is a mixture-of-experts model; use a dense one"
    if critic.vocab_size != policy.vocab_size:
        sizes = f"the critic's vocabulary has {critic.vocab_size} entries, the policy's {policy.vocab_size}"
        return f"{sizes}; both read the same tokens, so take a critic with the policy's tokenizer"
    tp = parallel.tensor_model_parallel_size
    problems = [
        f"parallel.tensor_model_parallel_size = {problem}" for problem in (_heads_problem(critic, tp), _ffn_problem(critic, tp)) if problem
    ]
    layers = _layers_problem(critic, parallel)
    return "; ".join([*problems, *([f"pipeline: {layers}"] if layers else [])]) or None


def _heads_problem(model: ModelArchitecture, tp: int) -> str | None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % tp:
        return f"{tp} does not divide the model's {heads} attention heads; use {_divisors(heads)}"
    if kv_heads % tp and tp % kv_heads:  # with fewer kv heads than ranks, each is replicated
        return f"{tp} neither divides the model's {kv_heads} key-value heads nor is a multiple of them (replication)"
    return None


def _ffn_problem(model: ModelArchitecture, tp: int) -> str | None:
    return f"{tp} does not divide the model's feed-forward size {model.ffn_hidden_size}" if model.ffn_hidden_size % tp else None


def _layers_problem(model: ModelArchitecture, parallel: ParallelConfig) -> str | None:
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    if model.num_layers % (pp * chunks) == 0:
        return None
    stages = f"{pp} pipeline ranks" + (f" x {chunks} virtual chunks = {pp * chunks} stages" if chunks > 1 else "")
    return f"the model's {model.num_layers} layers do not split evenly over {stages}; use a product among {_divisors(model.num_layers)}"


@rule("model.attention", "parallel.context_parallel_size")
def varlen_attention_has_no_context_parallelism(s: Subject) -> str | None:
    cp = s.config.parallel.context_parallel_size
    if s.config.model.attention != "varlen" or cp == 1:
        return None
    return f"'varlen' does not split sequences over context-parallel ranks, but parallel.context_parallel_size = {cp}; use te, sdpa or auto"


@rule("rollout.tensor_parallel_size", "parallel.world_size")
def rollout_replicas_fill_the_world(s: Subject) -> str | None:
    tp, world = s.config.rollout.tensor_parallel_size, s.config.parallel.world_size
    if tp is None or world % tp == 0:
        return None
    return f"{tp} does not divide parallel.world_size = {world}: every process belongs to one rollout replica; use {_divisors(world)}"


@rule("rollout.tensor_parallel_size", "model.path")
def rollout_tensor_parallel_splits_heads(s: Subject) -> str | None:
    assert s.architecture is not None
    tp = s.config.rollout.tensor_parallel_size
    return None if tp is None else _heads_problem(s.architecture, tp)  # null: the trainer's own degree, which has its rule above


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 512) + 1) if number % d == 0)


# --- lengths and batches ----------------------------------------------------------------------------------------------


@rule("batch.mini_batch_size", "batch.prompts_per_step", "batch.responses_per_prompt")
def mini_batch_fits_the_rollout(s: Subject) -> str | None:
    b = s.config.batch
    if b.mini_batch_size <= b.responses_per_step:
        return None
    return (
        f"{b.mini_batch_size} responses per optimizer step, but one rollout has prompts_per_step x responses_per_prompt = "
        f"{b.prompts_per_step} x {b.responses_per_prompt} = {b.responses_per_step} responses; use at most {b.responses_per_step}"
    )


@rule(
    "batch.max_tokens_per_microbatch",
    "data.max_prompt_length",
    "rollout.max_response_length",
    "parallel.tensor_model_parallel_size",
    "parallel.context_parallel_size",
)
def longest_sequence_fits_a_microbatch(s: Subject) -> str | None:
    c = s.config
    longest = c.max_sequence_length
    padded = -(-longest // c.parallel.microbatch_multiple) * c.parallel.microbatch_multiple
    if padded <= c.batch.max_tokens_per_microbatch:
        return None
    padding = f", padded to {padded} (a multiple of {c.parallel.microbatch_multiple} for TP/CP)" if padded != longest else ""
    return (
        f"{c.batch.max_tokens_per_microbatch} tokens cannot hold the longest sequence: data.max_prompt_length + "
        f"rollout.max_response_length = {c.data.max_prompt_length} + {c.rollout.max_response_length} = {longest}{padding}; "
        f"use at least {padded}"
    )


@rule("rollout.max_response_length", "data.max_prompt_length", "model.path")
def longest_sequence_fits_the_model(s: Subject) -> str | None:
    assert s.architecture is not None
    c, limit = s.config, s.architecture.max_position_embeddings
    if c.max_sequence_length <= limit:
        return None
    return (
        f"data.max_prompt_length + rollout.max_response_length = {c.data.max_prompt_length} + {c.rollout.max_response_length} = "
        f"{c.max_sequence_length} tokens, above the model's max_position_embeddings = {limit}"
    )


@rule("rollout.vllm.max_num_batched_tokens", "rollout.vllm.max_num_seqs", "rollout.engine")
def vllm_batched_tokens_hold_its_sequences(s: Subject) -> str | None:
    v = s.config.rollout.vllm
    if v.max_num_batched_tokens is None or v.max_num_batched_tokens >= v.max_num_seqs:
        return None
    return f"{v.max_num_batched_tokens} is below rollout.vllm.max_num_seqs = {v.max_num_seqs}: one token each would not fit; raise it"


# --- data -------------------------------------------------------------------------------------------------------------


@rule("data.train")
def train_sources_have_distinct_names(s: Subject) -> str | None:
    return _repeated_names([source.name for source in s.config.data.train])


@rule("data.eval")
def eval_sources_have_distinct_names(s: Subject) -> str | None:
    return _repeated_names([source.name for source in s.config.data.eval])


@rule("data.train")
def train_weights_share_between_sources(s: Subject) -> str | None:
    sources = s.config.data.train
    if len(sources) > 1 or sources[0].weight == 1.0:
        return None
    return f"weight = {sources[0].weight} of {sources[0].name!r} has no effect: it is the only source; remove it"


@rule("data.eval")
def eval_sources_have_no_weight(s: Subject) -> str | None:
    weighted = [source.name for source in s.config.data.eval if source.weight != 1.0]
    return f"weight of {', '.join(map(repr, weighted))} has no effect: evaluation takes every prompt; remove it" if weighted else None


def _repeated_names(names: list[str]) -> str | None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"several sources are named {', '.join(map(repr, repeated))}; metrics go by name, so give each its own" if repeated else None


@rule("eval.samples_per_prompt", "eval.temperature", "data.eval")
def greedy_evaluation_takes_one_sample(s: Subject) -> str | None:
    e = s.config.eval
    if not s.config.data.eval or e.temperature > 0 or e.samples_per_prompt == 1:
        return None
    return f"{e.samples_per_prompt} greedy responses (eval.temperature = 0) to a prompt are all the same; use 1, or a temperature above 0"


# --- sampling and rewards ---------------------------------------------------------------------------------------------


_CUTS_THE_DISTRIBUTION = "cuts the distribution that training samples from, so the trainer's log-probs would be biased"


@rule("rollout.top_p")
def training_samples_the_whole_distribution(s: Subject) -> str | None:
    top_p = s.config.rollout.top_p
    if top_p == 1.0:
        return None
    return f"{top_p} {_CUTS_THE_DISTRIBUTION}; use 1.0 (eval.top_p is free)"


@rule("rollout.top_k")
def training_samples_all_tokens(s: Subject) -> str | None:
    top_k = s.config.rollout.top_k
    if top_k == -1:
        return None
    return f"{top_k} {_CUTS_THE_DISTRIBUTION}; use -1"


@rule("rollout.dynamic_sampling.enabled", "batch.responses_per_prompt")
def dynamic_sampling_needs_groups(s: Subject) -> str | None:
    if s.config.rollout.dynamic_sampling.enabled and s.config.batch.responses_per_prompt == 1:
        return "true drops groups whose verdicts are all alike, and with batch.responses_per_prompt = 1 every group is; use at least 2"
    return None


@rule("reward.scale.source")
def reward_scale_has_a_source_interval(s: Subject) -> str | None:
    scale = s.config.reward.scale
    if scale is None or scale.source[0] < scale.source[1]:
        return None
    return f"{list(scale.source)} must be an interval [low, high] with low < high"


@rule("reward.scale.target")
def reward_scale_rewards_what_is_right(s: Subject) -> str | None:
    scale = s.config.reward.scale
    if scale is None or scale.target[0] < scale.target[1]:
        return None
    return f"{list(scale.target)} must be an interval [low, high] with low < high, or a right answer earns no more than a wrong one"


@rule("reward.overlong.cache", "rollout.max_response_length")
def overlong_cache_is_inside_the_response(s: Subject) -> str | None:
    overlong, longest = s.config.reward.overlong, s.config.rollout.max_response_length
    if overlong is None or overlong.cache < longest:
        return None
    return f"{overlong.cache} must be below rollout.max_response_length = {longest}: the penalty starts at their difference"


# --- algorithm --------------------------------------------------------------------------------------------------------


@rule("batch.responses_per_prompt", "algorithm.advantage.estimator")
def group_estimators_need_groups(s: Subject) -> str | None:
    estimator, size = s.config.algorithm.advantage.estimator, s.config.batch.responses_per_prompt
    if estimator not in GROUP_ESTIMATORS or size > 1:
        return None
    return (
        f"1 makes every advantage of algorithm.advantage.estimator = {estimator!r} zero (a group of one); "
        "use at least 2, or another estimator"
    )


@rule("algorithm.advantage.estimator")
def process_supervision_has_step_rewards(s: Subject) -> str | None:
    if s.config.algorithm.advantage.estimator != "grpo_process":
        return None
    return "'grpo_process' needs a reward for each step of a response, which no verifier gives yet; use 'grpo'"


@rule("algorithm.advantage.lambda_policy.alpha", "algorithm.advantage.lambda_policy.kind", "rollout.max_response_length")
def length_adaptive_lambda_rises_above_zero(s: Subject) -> str | None:
    lam, longest = s.config.algorithm.advantage.lambda_policy, s.config.rollout.max_response_length
    if not s.config.uses_critic or lam.kind != "length_adaptive" or lam.alpha * longest > 1:
        return None
    return (
        f"{lam.alpha} gives lambda = 0 to every response: lambda = 1 - 1/(alpha l) is 0 up to l = 1/alpha = {1 / lam.alpha:.0f} tokens, "
        f"and rollout.max_response_length = {longest}; raise alpha, or use kind: fixed"
    )


@rule("algorithm.advantage.lambda_policy.min", "algorithm.advantage.lambda_policy.max", "algorithm.advantage.lambda_policy.kind")
def sigmoid_lambda_has_a_range(s: Subject) -> str | None:
    lam = s.config.algorithm.advantage.lambda_policy
    if lam.kind != "sigmoid" or lam.min < lam.max:
        return None
    return f"{lam.min} must be below max = {lam.max}"


@rule("algorithm.policy_loss.importance_correction.kind", "rollout.old_logprobs")
def importance_correction_needs_recomputed_logprobs(s: Subject) -> str | None:
    kind = s.config.algorithm.policy_loss.importance_correction.kind
    if kind == "off" or s.config.rollout.old_logprobs == "recompute":
        return None
    return (
        f"{kind!r} compares the trainer's old log-probs with the rollout's, but rollout.old_logprobs = 'rollout' makes them "
        "the same; use 'recompute'"
    )


@rule("algorithm.policy_loss.importance_correction.low", "algorithm.policy_loss.importance_correction.cap")
def importance_mask_has_a_range(s: Subject) -> str | None:
    correction = s.config.algorithm.policy_loss.importance_correction
    if not correction.kind.endswith("_mask") or correction.low < correction.cap:
        return None
    return f"{correction.low} must be below cap = {correction.cap}: tokens whose ratio is outside [low, cap] are masked"


@rule("algorithm.kl.kind", "algorithm.kl.place")
def kl_loss_has_a_gradient(s: Subject) -> str | None:
    kl = s.config.algorithm.kl
    if kl.place != "loss" or kl.kind != "k1":
        return None
    return "'k1' in the loss has an expected gradient of zero; use 'k2' or 'k3' there, or place: reward"


@rule("algorithm.kl.place", "algorithm.advantage.estimator")
def kl_in_the_reward_reaches_the_advantages(s: Subject) -> str | None:
    estimator = s.config.algorithm.advantage.estimator
    if s.config.algorithm.kl.place != "reward" or estimator not in GROUP_ESTIMATORS:
        return None
    return (
        f"'reward' has no effect with algorithm.advantage.estimator = {estimator!r}, which compares one reward a response and reads no "
        "token's penalty; use place: loss, or an estimator that does ('gae', 'reinforce', 'reinforce_pp')"
    )


@rule("algorithm.kl.coef", "algorithm.kl.place")
def kl_has_a_coefficient(s: Subject) -> str | None:
    kl = s.config.algorithm.kl
    if kl.place == "off" or kl.coef > 0:
        return None
    return (
        f"0 with algorithm.kl.place = {kl.place!r} would load a reference model for nothing; "
        "give a coefficient (DeepSeekMath: 0.04) or place: off"
    )


# --- critic -----------------------------------------------------------------------------------------------------------


@rule("critic.path", "critic.init", "algorithm.advantage.estimator")
def critic_init_has_a_path(s: Subject) -> str | None:
    critic = s.config.critic
    if not s.config.uses_critic or critic.init == "policy" or critic.path is not None:
        return None
    return f"is required with critic.init = {critic.init!r}: the folder to load the critic from"


@rule("critic.value_pretraining.steps", "critic.init", "algorithm.advantage.estimator")
def saved_critic_says_whether_to_pretrain(s: Subject) -> str | None:
    critic = s.config.critic
    pretraining = critic.value_pretraining
    if not s.config.uses_critic or critic.init != "saved" or pretraining.until is not None or s.given("critic.value_pretraining.steps"):
        return None
    return (
        f"defaults to {pretraining.steps}, but critic.init = 'saved' loads a critic that was trained before; give 0, or a number to go on"
    )


@rule("critic.value_pretraining.until")
def until_has_a_threshold(s: Subject) -> str | None:
    until = s.config.critic.value_pretraining.until
    if until is None or until.value_loss_below is not None or until.explained_variance_above is not None:
        return None
    return "needs value_loss_below, explained_variance_above or both; with neither, give steps instead of until"


@rule("critic.value_pretraining.until.window", "critic.value_pretraining.until.max_steps")
def until_window_fits(s: Subject) -> str | None:
    until = s.config.critic.value_pretraining.until
    if until is None or until.window <= until.max_steps:
        return None
    return f"{until.window} steps in a row can never be seen within max_steps = {until.max_steps}"
