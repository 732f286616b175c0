"""One rollout batch for a step: a round of sampling, or with dynamic sampling as many as it takes up to the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vapo_mcore.collectives import broadcast_object, world
from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.errors import StepAbandoned
from vapo_mcore.experience.dynamic_sampling import GroupCollector
from vapo_mcore.experience.sampling import ResponseSampler, Round, keep_groups
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rollout.base import SamplingConfig


@dataclass(frozen=True)
class SamplingCounts:
    """What dynamic sampling tried and dropped in a step."""

    rounds: int
    prompts_tried: int
    dropped_all_right: int = 0
    dropped_all_wrong: int = 0
    dropped_ungraded: int = 0
    dropped_surplus: int = 0


def training_sampling(config: Config) -> SamplingConfig:
    """How training samples: the configured temperature over the whole distribution."""
    rollout = config.rollout
    return SamplingConfig(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, max_tokens=rollout.max_response_length)


def shown_rows(rows: int, count: int) -> set[int]:
    """``count`` row numbers spread evenly over ``rows``."""
    return {number * rows // count for number in range(min(count, rows))} if count else set()


def collect(
    config: Config,
    sampler: ResponseSampler,
    next_prompts: Callable[[int], Sequence[Prompt]],
    *,
    seed_step: int,
    timer: PhaseTimer,
    dynamic: bool,
) -> tuple[Round, SamplingCounts]:
    """The step's responses. A collective; every rank draws the same prompts.

    Raises StepAbandoned on all ranks when dynamic sampling could not fill the batch and ``on_exhausted`` is ``stop``.
    """
    size = config.batch.responses_per_prompt
    sampling = training_sampling(config)

    def draw(prompts: int) -> Round:
        show = shown_rows(prompts * size, config.run.samples_per_step)
        return sampler.sample(next_prompts(prompts), size, sampling, seed_step=seed_step, timer=timer, show=show)

    wanted = config.batch.prompts_per_step
    if not dynamic:
        return draw(wanted), SamplingCounts(rounds=1, prompts_tried=wanted)
    collector = GroupCollector(target=wanted, max_rounds=config.rollout.dynamic_sampling.max_rounds)
    rounds: list[Round] = []
    while (prompts := collector.next_draw()) > 0:
        rounds.append(draw(prompts))
        if world()[0] == 0:
            rows = rounds[-1].rows
            collector.add_round(rows.verdict.view(-1, size).tolist(), rows.graded.view(-1, size).tolist())
        collector = broadcast_object(collector)
    if collector.exhausted and config.rollout.dynamic_sampling.on_exhausted == "stop":
        raise StepAbandoned(
            f"dynamic sampling kept {len(collector.kept)} of {wanted} prompts after {collector.rounds} rounds "
            f"({collector.tried} prompts tried, {collector.all_right} groups all right, {collector.all_wrong} all wrong, "
            f"{collector.ungraded} without a verdict), and "
            "rollout.dynamic_sampling.on_exhausted = 'stop'; use easier or harder data, more max_rounds, or 'train' to go on with "
            "what there is"
        )
    dropped = (collector.all_right, collector.all_wrong, collector.ungraded, collector.surplus)
    counts = SamplingCounts(collector.rounds, collector.tried, *dropped)
    return keep_groups(rounds, collector.kept), counts
