"""The models of a run by role (policy, critic, frozen reference), and the critic's new optimizer between stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import Config, OptimizerConfig
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.megatron.parallel import ParallelContext


@dataclass
class Models:
    """The models of a run on this rank; ``residency`` moves them between host and device.

    ``critic`` is None for critic-free estimators. ``reference``: host copies of the policy's initial parameters for a KL term, swapped
    into the policy's buffers when needed (None without a KL term). ``critic_updates``: updates by the critic's earlier optimizers.
    """

    architecture: ModelArchitecture
    policy: MegatronModel
    critic: MegatronModel | None
    reference: list[Tensor] | None
    residency: Residency
    critic_updates: int = 0


def build_critic(
    config: Config,
    architecture: ModelArchitecture,
    parallel: ParallelContext,
    load: Callable[[list[Any]], object],
    settings: OptimizerConfig,
    head_only: bool,
) -> MegatronModel:
    return MegatronModel(
        "critic",
        architecture,
        config.model,
        parallel,
        load_weights=load,
        optimizer=settings,
        warmup_updates=settings.warmup_rollouts * config.critic_updates_per_step,
        head_only=head_only,
        head_dropout=config.critic.head_dropout,
    )


def refresh_critic(config: Config, models: Models) -> None:
    """Prepare the critic for the RL stage.

    If value pretraining had its own learning rate or a frozen trunk, rebuilds the critic with the same weights and a new optimizer with
    the settings of ``critic.optimizer``; otherwise keeps it.
    """
    pretraining = config.critic.value_pretraining
    if models.critic is None or (pretraining.lr is None and not pretraining.head_only):
        return
    models.residency.remove("critic")
    assert models.critic.optimizer is not None
    models.critic_updates += models.critic.optimizer.updates
    old = models.critic.chunks

    @torch.no_grad()
    def copy(chunks: list[Any]) -> None:
        for new_chunk, old_chunk in zip(chunks, old, strict=True):
            sources = dict(old_chunk.named_parameters())
            for name, parameter in new_chunk.named_parameters():
                parameter.copy_(sources[name])

    models.critic = build_critic(config, models.critic.architecture, models.critic.parallel, copy, config.critic.optimizer, head_only=False)
    models.residency.add(models.critic)
