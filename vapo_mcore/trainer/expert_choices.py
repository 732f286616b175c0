"""Carry choices of experts through a step: the engine's to the policy's passes, the trainer's from a pass to the updates after it."""

from __future__ import annotations

from torch import Tensor

from vapo_mcore.checkpoint_files import Stage
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES
from vapo_mcore.experience.batches import Experience
from vapo_mcore.megatron.engine import MegatronModel, choices_name
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.step_metrics import record_engine_choices


def repeats_engine(config: Config, stage: Stage) -> bool:
    """Return whether the policy's passes repeat the experts that the engine chose. Value pretraining has no passes of the policy."""
    return stage == "rl" and config.model.router.replay == "engine"


def repeats_choices(config: Config, model: MegatronModel) -> bool:
    """Return whether the model's updates repeat the experts of the pass before them."""
    return model.routing is not None and config.model.router.replay != "off"


def keep_engine_choices(experience: Experience, policy: MegatronModel, *, repeats: bool) -> None:
    """Keep the engine's choices of this rank's layers, on the host."""
    batch = experience.batch
    assert (ENGINE_CHOICES in batch) == repeats, "a rollout has the engine's choices exactly where the policy repeats them"
    if repeats:
        assert policy.routing is not None
        batch[ENGINE_CHOICES] = batch[ENGINE_CHOICES][:, policy.routing.layers].cpu()


def policy_pass(
    config: Config, policy: MegatronModel, experience: Experience, outputs: tuple[str, ...], metrics: StepMetrics
) -> dict[str, list[Tensor]]:
    """Run the log-prob pass, by the engine's choices if the rollout has them, and store its choices for the updates.

    What it stores has a choice for every token: the engine's, and the trainer's for the last token of each sequence.
    """
    microbatches, replays, given = experience.microbatches(), repeats_choices(config, policy), ENGINE_CHOICES in experience.batch
    if given:
        assert policy.routing is not None
        microbatches = [experience.with_tensors(part, [ENGINE_CHOICES]) for part in microbatches]
        policy.routing.reset_statistics()
    found = policy.forward(microbatches, temperature=config.rollout.temperature, outputs=outputs, record_choices=replays)
    if given:
        assert policy.routing is not None
        record_engine_choices(metrics, policy.routing.statistics())
        experience.batch.drop(ENGINE_CHOICES)
    if replays:
        experience.store(choices_name("policy"), found.pop(choices_name("policy")))
    return found
