"""Measure the critic's explained variance on held-out prompts, which training does not bias and which is comparable over a run.

Prompts and sampling seeds are fixed. The current policy samples the responses, and the critic never trains on them. During value
pretraining the policy is fixed, so every step measures the same responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vapo_mcore.algorithm.advantages import reward_to_go
from vapo_mcore.algorithm.losses import explained_variance
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt, PromptDataset
from vapo_mcore.errors import DataError
from vapo_mcore.experience.batches import Experience, distribute, plan_minibatches
from vapo_mcore.experience.collecting import training_sampling
from vapo_mcore.experience.sampling import ResponseSampler, Round
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.trainer.advantages import AdvantageEstimator, shaped_rewards, trainable_rows

SEED_STEP = -1
"""Rollouts use seed steps from 1 and evaluations use 0, so the probe shares its seeds with neither."""
_SHOWN = 5


def probe_prompts(config: Config, train: PromptDataset, held_out: PromptDataset | None) -> list[Prompt]:
    """Return the probe's prompts, spread evenly over ``data.eval``; an empty list without a probe.

    Raises DataError if ``data.eval`` has too few prompts, or if a chosen one is a training prompt (compared by text, ignoring case and
    whitespace).
    """
    probe = config.critic.probe
    if not config.uses_critic or probe is None:
        return []
    assert held_out is not None, "the configuration requires data.eval for a probe"
    items = held_out.items
    if len(items) < probe.prompts:
        raise DataError(f"critic.probe.prompts = {probe.prompts}, but data.eval has {len(items)} prompts; use at most {len(items)}")
    chosen = [items[number * len(items) // probe.prompts] for number in range(probe.prompts)]
    trained = set().union(*train.keys.values())
    shared = [prompt.prompt_id for prompt in chosen if held_out.key_of[prompt.prompt_id] in trained]
    if shared:
        names = ", ".join(shared[:_SHOWN]) + (", ..." if len(shared) > _SHOWN else "")
        raise DataError(
            f"critic.probe: {len(shared)} of its {len(chosen)} prompts are training prompts ({names}): the critic would be measured on "
            "its training data; remove them from data.train or data.eval, or set critic.probe: null"
        )
    return chosen


class CriticProbe:
    """Samples held-out responses and measures the critic on them, in its layout. Every method is a collective over all ranks."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], parallel: ParallelContext, sampler: ResponseSampler) -> None:
        self.config = config
        self.prompts = prompts
        self.parallel = parallel
        self.sampler = sampler
        self.dp_rank_of_rank = all_gather_objects(parallel.data_parallel_rank)
        self.experience: Experience | None = None  # the last sampled responses

    def is_due(self, step: int) -> bool:
        """Return whether this RL step is measured. The last step always is."""
        assert self.config.critic.probe is not None
        return step % self.config.critic.probe.every_steps == 0 or step == self.config.run.steps

    def sample(self, models: Models) -> None:
        """Sample responses with the rollout engine, which must be awake."""
        probe = self.config.critic.probe
        assert probe is not None
        sampled = self.sampler.sample(
            self.prompts, probe.responses_per_prompt, training_sampling(self.config), seed_step=SEED_STEP, timer=PhaseTimer()
        )
        self.hold(sampled, models)

    def hold(self, sampled: Round, models: Models) -> None:
        """Distribute the responses to measure."""
        rows = replace(sampled.rows, reward=shaped_rewards(self.config, sampled.rows))
        plan = plan_minibatches(self.config, models.architecture, self.parallel, rows, SEED_STEP)
        self.experience = distribute(
            sampled, rows, trainable_rows(self.config, rows), rows.verdict, plan, self.parallel, self.dp_rank_of_rank
        )

    def explained_variance(self, models: Models, estimator: AdvantageEstimator) -> float | None:
        """Return the explained variance of the current critic's values on the sampled responses' Monte-Carlo returns; None if undefined.

        The returns are plain reward sums, independent of lambda_critic and without KL penalty, so they contain no predicted values.
        """
        experience = self.experience
        assert experience is not None and models.critic is not None, "sample first"
        if not experience.minibatches:
            return None
        models.residency.enter("values")
        experience.store("values", models.critic.forward(experience.microbatches(), outputs=("values",))["values"])
        estimator.place_rewards(experience, kl=False)
        batch, mask = experience.batch, experience.mask
        returns = reward_to_go(batch["rewards"], mask, experience.cu_seqlens, self.config.algorithm.advantage.gamma)
        return explained_variance(batch["values"], returns, mask, self.parallel.data_parallel_group)
