"""Rules on lengths, batches and data."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule
from vapo_mcore.config.schema import Config


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
    "critic.parallel",
)
def longest_sequence_fits_a_microbatch(s: Subject) -> str | None:
    c = s.config
    longest = c.max_sequence_length
    multiples = {"": c.parallel.microbatch_multiple, " of the critic": c.critic_parallel.microbatch_multiple if c.uses_critic else 1}
    padded, multiple, whose = max((-(-longest // multiple) * multiple, multiple, whose) for whose, multiple in multiples.items())
    if whose and multiple == c.parallel.microbatch_multiple:
        whose = ""
    if padded <= c.batch.max_tokens_per_microbatch:
        return None
    padding = f", padded to {padded} (a multiple of {multiple} for TP/CP{whose})" if padded != longest else ""
    return (
        f"{c.batch.max_tokens_per_microbatch} tokens cannot hold the longest sequence: {_longest_sequence(c)}{padding}; "
        f"use at least {padded}"
    )


@rule("rollout.max_response_length", "data.max_prompt_length", "model.path")
def longest_sequence_fits_the_model(s: Subject) -> str | None:
    assert s.architecture is not None
    c, limit = s.config, s.architecture.max_position_embeddings
    if c.max_sequence_length <= limit:
        return None
    unscaled = s.architecture.rope_scaling is not None and limit == s.architecture.rope_scaling.get("original_max_position_embeddings")
    remedy = "; config.json scales RoPE, so set max_position_embeddings there to the scaled length" if unscaled else ""
    return f"{_longest_sequence(c)} tokens, above the model's max_position_embeddings = {limit}{remedy}"


def _longest_sequence(c: Config) -> str:
    """Return the computation of ``max_sequence_length`` as text."""
    names, numbers = "data.max_prompt_length + rollout.max_response_length", f"{c.data.max_prompt_length} + {c.rollout.max_response_length}"
    if (environment := c.rollout.environment) is not None:
        names += " + (rollout.environment.max_turns - 1) x max_observation_length"
        numbers += f" + {environment.max_turns - 1} x {environment.max_observation_length}"
    return f"{names} = {numbers} = {c.max_sequence_length}"


@rule("rollout.vllm.max_num_batched_tokens", "rollout.vllm.max_num_seqs", "rollout.engine")
def vllm_batched_tokens_hold_its_sequences(s: Subject) -> str | None:
    v = s.config.rollout.vllm
    if v.max_num_batched_tokens is None or v.max_num_batched_tokens >= v.max_num_seqs:
        return None
    return f"{v.max_num_batched_tokens} is below rollout.vllm.max_num_seqs = {v.max_num_seqs}: one token per sequence must fit; raise it"


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
    return f"weight of {', '.join(map(repr, weighted))} has no effect: evaluation uses every prompt; remove it" if weighted else None


def _repeated_names(names: list[str]) -> str | None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"several sources are named {', '.join(map(repr, repeated))}; metrics use the names, so make them distinct" if repeated else None


@rule("eval.samples_per_prompt", "eval.temperature", "data.eval")
def greedy_evaluation_takes_one_sample(s: Subject) -> str | None:
    e = s.config.eval
    if not s.config.data.eval or e.temperature > 0 or e.samples_per_prompt == 1:
        return None
    return f"{e.samples_per_prompt} greedy responses (eval.temperature = 0) to a prompt are identical; use 1, or a temperature above 0"
