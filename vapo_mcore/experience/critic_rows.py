"""Rows and tokens of a rollout for a critic whose layout is not the policy's (``critic.parallel``).

Rewards, advantages and returns are computed where the policy's layout owns the rows. Another layout owns the same rows on other ranks:
they get tokens and mask like the policy's, send the critic's values there, and receive its returns. Mini-batches have the same rows in
both, in other micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vapo_mcore.algorithm.segments import all_reduce_sum
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import exchange
from vapo_mcore.experience.batches import Experience, distribute, plan_minibatches
from vapo_mcore.experience.sampling import Round
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models

_READ_BY_THE_CRITIC = ("tokens", "response_mask")


class CriticRows:
    """Moves tokens, values and returns between the layouts of policy and critic; does nothing where they share one.

    Every method is a collective over all ranks.
    """

    def __init__(self, config: Config, models: Models, parallel: ParallelContext) -> None:
        """``parallel``: the policy's layout."""
        self.config = config
        self.models = models  # the critic may be replaced between stages, with the same layout
        self.differ = models.critic is not None and models.critic.parallel is not parallel
        self.dp_rank_of_rank = all_gather_objects(self._layout.data_parallel_rank) if self.differ else []

    @property
    def _layout(self) -> ParallelContext:
        assert self.models.critic is not None
        return self.models.critic.parallel

    def distribute(self, sampled: Round, experience: Experience, rollout: int) -> None:
        """Send the tokens of ``experience`` to their owners in the critic's layout as well. ``rollout``: as of ``plan_minibatches``."""
        if not self.differ:
            return
        assert self.models.critic is not None
        plan = plan_minibatches(self.config, self.models.critic.architecture, self._layout, experience.rows, rollout)
        read = replace(sampled, local=sampled.local.only(_READ_BY_THE_CRITIC))
        positive = torch.zeros_like(experience.trainable)
        experience.elsewhere = distribute(
            read, experience.rows, experience.trainable, positive, plan, self._layout, self.dp_rank_of_rank, experience.skipped
        )

    def store_values(self, experience: Experience, found: Mapping[str, Sequence[Tensor]]) -> None:
        """Store the critic's outputs, by micro-batch of its layout, and send them to the owners of the rows in the policy's."""
        own = experience.in_critic_layout
        own.store("values", found["values"])
        if "bootstrap_values" in found:
            own.bootstrap_values = own.store_rows(found["bootstrap_values"])
        if own is experience:
            return
        send_tokens("values", own, experience)
        if own.bootstrap_values is not None:
            table = torch.zeros(len(own.rows), dtype=torch.float32, device=own.cu_seqlens.device)
            table[own.batch.row_ids.to(table.device)] = own.bootstrap_values  # each row is on one data-parallel rank
            experience.bootstrap_values = experience.on_rows(all_reduce_sum(table, self._layout.data_parallel_group).cpu())

    def with_returns(self, experience: Experience) -> Experience:
        """Return ``experience`` as the critic's layout owns it, with the returns that its update fits."""
        own = experience.in_critic_layout
        if own is not experience:
            send_tokens("returns", experience, own)
        return own


def send_tokens(name: str, source: Experience, target: Experience) -> None:
    """Send a per-token tensor from the owners of the rows in one layout to those in another. Collective over all ranks.

    ``source`` and ``target`` have the same rows; the first rank of those that own a row sends it.
    """
    assert source.owners is not None and target.owners is not None, "made by distribute"
    sent = exchange(
        source.batch.only((name,)),
        source.rows,
        holder=source.owners.first_ranks,
        owner=target.owners.data_parallel_rank,
        dp_rank_of_rank=target.owners.dp_rank_of_rank,
    )
    assert torch.equal(sent.row_ids, target.batch.row_ids), "both layouts own the same rows"
    target.batch[name] = sent[name]
