"""Run steps on existing responses, without a rollout engine: nothing is sampled and no weights are synchronised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.experience.sampling import ResponseSampler
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models
from vapo_mcore.trainer.critic_probe import CriticProbe
from vapo_mcore.trainer.step import StepRunner
from vapo_mcore.trainer.step_state import StepState
from vapo_mcore.weights.sync import WeightSync


class _NoSampler:
    """Replaces the sampler: has only what a step asks for."""

    def take_recoveries(self) -> tuple[int, int]:
        """Return (0, 0): nothing can fail."""
        return 0, 0


NO_SAMPLER = cast(ResponseSampler, _NoSampler())


def _no_prompts(count: int) -> Sequence[Prompt]:
    raise AssertionError("the responses exist already: no prompt is drawn")


class OfflineStepRunner(StepRunner):
    """A StepRunner without a rollout engine. A subclass returns its responses from ``_sample`` and answers in place of ``_dump``."""

    def __init__(self, config: Config, parallel: ParallelContext, models: Models, *, probe: CriticProbe | None = None) -> None:
        super().__init__(config, parallel, models, NO_SAMPLER, cast(WeightSync, None), _no_prompts, probe=probe)

    def _sync(self, step: StepState) -> None:
        """Do nothing: there is no engine."""
