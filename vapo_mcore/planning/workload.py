"""Compute a step's workload (tokens, micro-batches, responses) from the recipe and an assumed mean response length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config, ParallelConfig

_MEAN_OF_LONGEST = 0.4
"""Default mean response length, as a fraction of the maximum."""
_PACKING = 0.97
"""Assumed fraction of a micro-batch's tokens that are neither padding nor unused."""


@dataclass(frozen=True)
class Workload:
    """Workload of one step.

    Attributes:
        response_length, sequence_length: assumed means in tokens, with prompts at half of their limit.
        tokens: tokens of all sequences; tokens_per_data_rank: of one data-parallel rank.
        microbatches_per_update: micro-batches of one rank per optimizer step; updates: optimizer steps per epoch.
        critic: the critic's workload where its layout is not the policy's.
    """

    responses: int
    response_length: int
    prompt_length: int
    tokens: int
    tokens_per_data_rank: int
    microbatches_per_update: int
    updates: int
    critic: Workload | None = None

    def of(self, role: str) -> Workload:
        """Return the workload of a model."""
        return self.critic if role == "critic" and self.critic is not None else self

    @property
    def sequence_length(self) -> int:
        return self.prompt_length + self.response_length


def workload(config: Config, mean_response_length: int | None) -> Workload:
    """Compute the workload of a recipe's step. ``mean_response_length`` None: ``_MEAN_OF_LONGEST`` of the maximum."""
    critic = _workload(config, mean_response_length, config.critic_parallel) if config.layouts_differ else None
    return replace(_workload(config, mean_response_length, config.parallel), critic=critic)


def _workload(config: Config, mean_response_length: int | None, parallel: ParallelConfig) -> Workload:
    batch = config.batch
    longest = config.rollout.max_response_length
    response = max(1, min(longest, mean_response_length or round(_MEAN_OF_LONGEST * longest)))
    prompt = max(1, config.data.max_prompt_length // 2)
    tokens = batch.responses_per_step * (prompt + response)
    ranks = parallel.data_parallel_size
    update_tokens = tokens / batch.updates_per_step / ranks
    microbatches = max(1, -(-int(update_tokens) // int(_PACKING * batch.max_tokens_per_microbatch)))
    if parallel.virtual_pipeline_model_parallel_size:
        stages = parallel.pipeline_model_parallel_size
        microbatches = -(-microbatches // stages) * stages
    return Workload(
        responses=batch.responses_per_step,
        response_length=response,
        prompt_length=prompt,
        tokens=tokens,
        tokens_per_data_rank=-(-tokens // ranks),
        microbatches_per_update=microbatches,
        updates=batch.updates_per_step,
    )


def packed_lengths(config: Config, work: Workload, role: str = "policy") -> list[int]:
    """Return lengths of sequences of mean length that fill a micro-batch of a model up to its cap."""
    cap, multiple = config.batch.max_tokens_per_microbatch, config.parallel_of(role).sequence_multiple
    length = max(multiple, work.sequence_length // multiple * multiple)
    count, rest = divmod(cap // multiple * multiple, length)
    return [length] * count + ([rest] if rest else [])
