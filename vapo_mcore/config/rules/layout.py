"""Rules on parallel degrees and the model's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.rules.base import Subject, rule
from vapo_mcore.config.schema import ParallelConfig

_DEGREES = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.data_parallel_size",
)
_OF_THE_CRITIC = ("critic.init", "critic.path", "algorithm.advantage.estimator")


@dataclass(frozen=True)
class _Layout:
    """A layout with the models that are laid out with it, as far as they could be read; ``subject`` says which in messages."""

    degrees: ParallelConfig
    models: list[ModelArchitecture]
    subject: str

    @property
    def mixtures(self) -> list[ModelArchitecture]:
        return [model for model in self.models if model.is_moe]


def _layout_rule(*keys: str) -> Callable[[Callable[[_Layout], str | None]], Callable[[_Layout], str | None]]:
    """Register a check for both layouts. ``keys`` that begin with a dot are settings of ``parallel`` and of ``critic.parallel``."""

    def register(check: Callable[[_Layout], str | None]) -> Callable[[_Layout], str | None]:
        @rule(*(f"parallel{key}" if key.startswith(".") else key for key in keys))
        @wraps(check)
        def of_policy(s: Subject) -> str | None:
            models = [s.architecture] if s.config.critic.parallel is not None else [s.architecture, s.critic_architecture]
            of_both = "the models are" if s.config.critic.parallel is None else "the policy is"
            return check(_Layout(s.config.parallel, [model for model in models if model is not None], of_both))

        @rule(*(f"critic.parallel{key}" if key.startswith(".") else key for key in keys), "parallel.world_size", *_OF_THE_CRITIC)
        @wraps(check)
        def of_critic(s: Subject) -> str | None:
            if s.config.critic.parallel is None or not s.config.uses_critic:
                return None
            model = s.architecture if s.config.critic.init == "policy" else s.critic_architecture
            return check(_Layout(s.config.critic_parallel, [] if model is None else [model], "the critic is"))

        return check

    return register


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
        return _undivided(p)
    if p.world_size != tp * pp * cp * dp:
        return (
            f"{p.world_size} is not tensor {tp} x pipeline {pp} x context {cp} x data {dp} = {tp * pp * cp * dp}; "
            f"with these degrees data_parallel_size is {p.world_size // (tp * pp * cp)} (omit it to derive it)"
        )
    return None


@rule("critic.parallel", "parallel.world_size", *_OF_THE_CRITIC)
def layout_of_the_critic_divides_the_world(s: Subject) -> str | None:
    if s.config.critic.parallel is None or not s.config.uses_critic:
        return None
    p = s.config.critic_parallel
    replica = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    return f"parallel.world_size = {_undivided(p)}, or smaller degrees here" if p.world_size % replica else None


def _undivided(p: ParallelConfig) -> str:
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    return (
        f"{p.world_size} processes cannot be split into model replicas of tensor {tp} x pipeline {pp} x context {cp} "
        f"= {tp * pp * cp} processes; use a multiple of {tp * pp * cp}"
    )


@_layout_rule(".sequence_parallel", ".tensor_model_parallel_size")
def sequence_parallel_needs_tensor_parallel(layout: _Layout) -> str | None:
    p = layout.degrees
    if p.sequence_parallel and p.tensor_model_parallel_size == 1:
        return "true splits activations over tensor-parallel ranks, but tensor_model_parallel_size = 1; remove it or raise the size"
    return None


@_layout_rule(".virtual_pipeline_model_parallel_size", ".pipeline_model_parallel_size")
def virtual_pipeline_needs_pipeline(layout: _Layout) -> str | None:
    p = layout.degrees
    chunks = p.virtual_pipeline_model_parallel_size
    if chunks is not None and p.pipeline_model_parallel_size == 1:
        return f"{chunks} interleaves {chunks} chunks on each pipeline rank, but pipeline_model_parallel_size = 1; use null"
    return None


@_layout_rule(".expert_model_parallel_size", ".expert_tensor_parallel_size", "parallel.world_size")
def expert_degrees_fill_the_world(layout: _Layout) -> str | None:
    p = layout.degrees
    ep, etp = p.expert_model_parallel_size, p.expert_tensor_parallel_size or p.tensor_model_parallel_size
    product = etp * ep * p.pipeline_model_parallel_size
    default = ep == 1 and p.expert_tensor_parallel_size is None  # the degrees of the other parameters, which another rule checks
    if default or p.world_size % product == 0:
        return None
    return (
        f"{p.world_size} processes cannot be split into copies of the experts over expert-tensor {etp} x expert {ep} x pipeline "
        f"{p.pipeline_model_parallel_size} = {product} processes; use a multiple of {product}, or smaller degrees"
    )


@_layout_rule(".expert_model_parallel_size", ".expert_tensor_parallel_size", "model.path", "critic.path")
def experts_split_over_their_ranks(layout: _Layout) -> str | None:
    p = layout.degrees
    degrees = [f"expert_model_parallel_size = {p.expert_model_parallel_size}"] if p.expert_model_parallel_size > 1 else []
    degrees += [f"expert_tensor_parallel_size = {p.expert_tensor_parallel_size}"] if p.expert_tensor_parallel_size is not None else []
    if not layout.mixtures:
        return f"{' and '.join(degrees)} split the experts of a mixture, but {layout.subject} dense; remove" if degrees else None
    if p.expert_model_parallel_size == 1 and p.expert_tensor_parallel_size not in (None, p.tensor_model_parallel_size):
        return (
            f"1 with expert_tensor_parallel_size = {p.expert_tensor_parallel_size} and tensor_model_parallel_size = "
            f"{p.tensor_model_parallel_size}: Megatron would not add up the experts' gradients of tensor-parallel ranks; use an "
            "expert_model_parallel_size above 1, or expert_tensor_parallel_size: null"
        )
    problems = [problem for model in layout.mixtures for problem in _experts_problems(model, p)]
    return "; ".join(dict.fromkeys(problems)) or None


def _experts_problems(model: ModelArchitecture, parallel: ParallelConfig) -> Iterator[str]:
    assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if model.num_experts % ep:
        yield f"{ep} ranks do not divide the model's {model.num_experts} experts; use {_divisors(model.num_experts)}"
    if model.moe_ffn_hidden_size % etp:
        yield f"expert-tensor {etp} does not divide the size {model.moe_ffn_hidden_size} of an expert (moe_intermediate_size)"


@_layout_rule(".sequence_parallel", ".tensor_model_parallel_size", "model.path", "critic.path")
def mixtures_with_tensor_parallelism_are_sequence_parallel(layout: _Layout) -> str | None:
    p = layout.degrees
    if p.sequence_parallel or p.tensor_model_parallel_size == 1 or not layout.mixtures:
        return None
    return (
        "false gives every tensor-parallel rank all tokens, which Megatron's exchange of a mixture's tokens rejects in training with "
        f"tensor_model_parallel_size = {p.tensor_model_parallel_size}; use true (the default)"
    )


@rule("model.path")
def model_has_no_attention_output_bias(s: Subject) -> str | None:
    assert s.architecture is not None
    if s.architecture.attention_output_bias:
        return f"{s.config.model.path!r} has a bias on the attention output (llama's attention_bias), which training does not support"
    return None


@_layout_rule(".tensor_model_parallel_size", "model.path")
def heads_split_over_tensor_parallel(layout: _Layout) -> str | None:
    return _heads_problem(layout.models[0], layout.degrees.tensor_model_parallel_size) if layout.models else None


@_layout_rule(".tensor_model_parallel_size", "model.path")
def ffn_splits_over_tensor_parallel(layout: _Layout) -> str | None:
    return _ffn_problem(layout.models[0], layout.degrees.tensor_model_parallel_size) if layout.models else None


@_layout_rule(".pipeline_model_parallel_size", ".virtual_pipeline_model_parallel_size", "model.path")
def layers_split_over_pipeline(layout: _Layout) -> str | None:
    return _layers_problem(layout.models[0], layout.degrees) if layout.models else None


@rule("critic.path", "critic.init", "model.path", "parallel", "critic.parallel", "algorithm.advantage.estimator")
def loaded_critic_fits_layout_and_tokens(s: Subject) -> str | None:
    """Check that both read the same tokens and, unless ``critic.parallel`` gives the critic another, can share one layout."""
    policy, critic, parallel = s.architecture, s.critic_architecture, s.config.parallel
    if policy is None or critic is None:
        return None
    if critic.vocab_size != policy.vocab_size:
        sizes = f"the critic's vocabulary has {critic.vocab_size} entries, the policy's {policy.vocab_size}"
        return f"{sizes}; both read the same tokens, so use a critic with the policy's tokenizer"
    if s.config.critic.parallel is not None:  # the rules of that layout name its keys
        return None
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
    if kv_heads % tp and tp % kv_heads:  # with fewer kv heads than ranks, kv heads are replicated
        return f"{tp} neither divides the model's {kv_heads} key-value heads nor is a multiple of them (replication)"
    return None


def _ffn_problem(model: ModelArchitecture, tp: int) -> str | None:
    if model.is_moe or model.ffn_hidden_size % tp == 0:  # a mixture has experts instead, which other degrees split
        return None
    return f"{tp} does not divide the model's feed-forward size {model.ffn_hidden_size}"


def _layers_problem(model: ModelArchitecture, parallel: ParallelConfig) -> str | None:
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    if model.num_layers % (pp * chunks) == 0:
        return None
    stages = f"{pp} pipeline ranks" + (f" x {chunks} virtual chunks = {pp * chunks} stages" if chunks > 1 else "")
    return f"the model's {model.num_layers} layers do not split evenly over {stages}; use a product among {_divisors(model.num_layers)}"


@rule("model.attention", "parallel.context_parallel_size", "critic.parallel.context_parallel_size")
def varlen_attention_has_no_context_parallelism(s: Subject) -> str | None:
    degrees = {"parallel": s.config.parallel.context_parallel_size, "critic.parallel": s.config.critic_parallel.context_parallel_size}
    split = next((f"{name}.context_parallel_size = {cp}" for name, cp in degrees.items() if cp > 1), None)
    if s.config.model.attention != "varlen" or split is None:
        return None
    return f"'varlen' does not split sequences over context-parallel ranks, but {split}; use te, sdpa or auto"


@rule("model.attention", "model.dtype")
def varlen_attention_is_for_bfloat16(s: Subject) -> str | None:
    if s.config.model.attention != "varlen" or s.config.model.dtype == "bfloat16":
        return None
    return f"the kernel of 'varlen' supports only bfloat16, but model.dtype = {s.config.model.dtype}; use sdpa, auto or dtype bfloat16"


@rule("rollout.tensor_parallel_size", "parallel.world_size")
def rollout_replicas_fill_the_world(s: Subject) -> str | None:
    tp, world = s.config.rollout.tensor_parallel_size, s.config.parallel.world_size
    if tp is None or world % tp == 0:
        return None
    return f"{tp} does not divide parallel.world_size = {world}, but every rank belongs to one rollout replica; use {_divisors(world)}"


@rule("rollout.tensor_parallel_size", "model.path")
def rollout_tensor_parallel_splits_heads(s: Subject) -> str | None:
    assert s.architecture is not None
    tp = s.config.rollout.tensor_parallel_size
    return None if tp is None else _heads_problem(s.architecture, tp)  # null: the trainer's degree, checked above


@rule("rollout.tensor_parallel_size", "parallel.tensor_model_parallel_size", "model.path")
def rollout_tensor_parallel_splits_experts(s: Subject) -> str | None:
    assert s.architecture is not None
    tp, size = s.config.rollout_tensor_parallel_size, s.architecture.moe_ffn_hidden_size
    if size is None or size % tp == 0:
        return None
    return f"{tp} ranks of a replica do not divide the size {size} of an expert (moe_intermediate_size); use {_divisors(size)}"


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 512) + 1) if number % d == 0)
