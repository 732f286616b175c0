"""Micro-batches of the fixed texts with made-up advantages and returns, for passes that train."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.record import NotApplicable
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.losses import PolicyLoss
from vapo_mcore.megatron.parallel import ParallelContext

MADE_ADVANTAGES = (1.0, -0.5)
"""Of tokens with even and with odd ids."""
_MADE = {"old_logprobs", "advantages", "policy_weights", "positive_weights", "importance_weights", "ref_logprobs"}


def policy_loss(bench: Bench, parallel: ParallelContext) -> PolicyLoss:
    """Return the recipe's loss. Raises NotApplicable if it reads other tensors than this module makes (user-defined terms, objectives)."""
    loss = PolicyLoss(bench.config, parallel.context_parallel_group)
    others = sorted(set(loss.tensors) - _MADE)
    if others:
        raise NotApplicable(f"the recipe's loss reads {', '.join(others)}, which only a rollout has")
    return loss


def policy_batches(
    model: MegatronModel, microbatches: Sequence[MicroBatch], temperature: float, log_ratio: float, trained: int | None = None
) -> list[MicroBatch]:
    """The micro-batches with what a policy loss reads: all tokens but each first one carry a loss, weights sum to 1 over the world, the
    log-ratio to the old policy is ``log_ratio`` at every token, advantages are ``MADE_ADVANTAGES`` by the token's id.

    ``trained``: tokens of all data-parallel ranks that carry a loss, where the ranks hold different sequences (None: all hold the same).
    """
    old = model.forward(microbatches, temperature=temperature)["logprobs"]
    made = []
    for microbatch, logprobs in zip(microbatches, old, strict=True):
        mask, weights = _mask_and_weights(microbatch, microbatches, model.parallel, trained)
        alternating = torch.where(microbatch.tensors["tokens"] % 2 == 0, *MADE_ADVANTAGES)
        made.append(
            microbatch.with_tensors(
                response_mask=mask,
                old_logprobs=logprobs - log_ratio,
                ref_logprobs=logprobs,
                advantages=alternating,
                policy_weights=weights,
                positive_weights=torch.zeros_like(weights),
                importance_weights=mask.float(),
            )
        )
    return made


def critic_batches(model: MegatronModel, microbatches: Sequence[MicroBatch], trained: int | None = None) -> list[MicroBatch]:
    """Return the same micro-batches for a critic; the return is 1 at every token."""
    made = []
    for microbatch in microbatches:
        mask, weights = _mask_and_weights(microbatch, microbatches, model.parallel, trained)
        made.append(microbatch.with_tensors(response_mask=mask, returns=torch.ones_like(weights), value_weights=weights))
    return made


def _mask_and_weights(
    microbatch: MicroBatch, microbatches: Sequence[MicroBatch], parallel: ParallelContext, trained: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss mask and weights. Where all data-parallel ranks hold the same sequences, each rank counts for its share."""
    mask = torch.ones_like(microbatch.tensors["tokens"], dtype=torch.bool)
    mask[microbatch.layout.cu_seqlens[:-1]] = False
    if trained is None:
        trained = sum(other.layout.num_tokens - other.layout.num_sequences for other in microbatches) * parallel.data_parallel_size
    return mask, mask.float() / trained
