"""Collect the responses of a step: one round of sampling or, with dynamic sampling, up to ``max_rounds`` rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from vapo_mcore.collectives import broadcast_object, world
from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt, split_evenly
from vapo_mcore.errors import StepAbandoned
from vapo_mcore.experience.dynamic_sampling import GroupCollector
from vapo_mcore.experience.occupancy import Occupancy
from vapo_mcore.experience.open_responses import HorizonCounts, OpenResponses
from vapo_mcore.experience.sampling import ResponseSampler, Round, keep_groups
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rollout.base import SamplingConfig


@dataclass(frozen=True)
class SamplingCounts:
    """Counts of sampled and dropped prompts and responses of a step.

    ``responses``, ``graded``, ``correct`` and ``tokens`` (response tokens) count all samples, including groups dropped later. With
    ``rollout.horizon``, ``tokens`` counts those sampled in the step, the others the responses that train in it. ``idle_frac`` and
    ``empty_frac`` are those of ``Occupancy``; None with several turns or rounds. ``moved_tokens``: carried between replicas with a horizon.
    """

    rounds: int
    prompts_tried: int
    dropped_all_right: int = 0
    dropped_all_wrong: int = 0
    dropped_ungraded: int = 0
    dropped_surplus: int = 0
    responses: int = 0
    graded: int = 0
    correct: int = 0
    tokens: int = 0
    horizon: HorizonCounts | None = None
    moved_tokens: int = 0
    idle_frac: float | None = None
    empty_frac: float | None = None

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Self:
        """Build from the ``asdict`` of another one."""
        horizon = record.get("horizon")
        if horizon is None:
            return cls(**record)
        cuts = tuple((row, tokens, float(value)) for row, tokens, value in horizon.get("cut_values", ()))
        return cls(**record | {"horizon": HorizonCounts(**horizon | {"cut_values": cuts})})

    def with_occupancy(self, tokens: Sequence[Sequence[int]], slots: int | None) -> SamplingCounts:
        """Return a copy with the shares of engine steps without work; arguments as of ``Occupancy.of_lengths``."""
        found = Occupancy.of_lengths(tokens, slots)
        return self if found is None else replace(self, idle_frac=found.idle, empty_frac=found.empty)

    def with_responses(self, rounds: Sequence[Round]) -> SamplingCounts:
        """Return a copy with the responses of ``rounds`` counted. The rows are replicated, so all ranks get the same counts."""
        rows = [part.rows for part in rounds]
        return replace(
            self,
            responses=sum(len(part) for part in rows),
            graded=sum(int(part.graded.sum()) for part in rows),
            correct=sum(int((part.graded & part.verdict).sum()) for part in rows),
            tokens=sum(int(part.response_length.sum()) for part in rows),
        )


def training_sampling(config: Config) -> SamplingConfig:
    """Return the sampling parameters of training rollouts."""
    rollout = config.rollout
    return SamplingConfig(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, max_tokens=rollout.max_response_length)


def shown_rows(rows: int, count: int) -> set[int]:
    """Return ``count`` row numbers spread evenly over ``rows``, or all of them if there are fewer."""
    count = min(count, rows)
    return {number * rows // count for number in range(count)}


def collect(
    config: Config,
    sampler: ResponseSampler,
    next_prompts: Callable[[int], Sequence[Prompt]],
    *,
    seed_step: int,
    timer: PhaseTimer,
    dynamic: bool,
    open_responses: OpenResponses | None = None,
    experts: bool = False,
) -> tuple[Round, SamplingCounts]:
    """Sample the step's responses. Collective; every rank draws the same prompts. ``experts``: with the engine's choices of experts.

    With ``open_responses``, sample a segment of each of them and return the responses that train now.

    Raises StepAbandoned on all ranks if dynamic sampling cannot fill the batch and ``on_exhausted`` is ``stop``.
    """
    size = config.batch.responses_per_prompt
    sampling = replace(training_sampling(config), return_experts=experts)

    if open_responses is not None:
        assert not dynamic, "the configuration refuses dynamic sampling with a horizon"
        return _continue_open(config, sampler, open_responses, next_prompts, sampling, seed_step=seed_step, timer=timer)

    def draw(prompts: int) -> Round:
        show = shown_rows(prompts * size, config.run.samples_per_step)
        return sampler.sample(next_prompts(prompts), size, sampling, seed_step=seed_step, timer=timer, show=show)

    if dynamic:
        return _collect_groups(config, draw)
    wanted = config.batch.prompts_per_step
    drawn = draw(wanted)
    counts = SamplingCounts(rounds=1, prompts_tried=wanted).with_responses([drawn])
    if config.rollout.environment is not None:
        return drawn, counts
    lengths = drawn.rows.response_length.tolist()
    parts = split_evenly(len(lengths), sampler.engine.num_replicas)
    return drawn, counts.with_occupancy([[lengths[row] for row in part] for part in parts], sampler.engine.max_running)


def _continue_open(
    config: Config,
    sampler: ResponseSampler,
    open_responses: OpenResponses,
    next_prompts: Callable[[int], Sequence[Prompt]],
    sampling: SamplingConfig,
    *,
    seed_step: int,
    timer: PhaseTimer,
) -> tuple[Round, SamplingCounts]:
    """Sample a segment of each open response, new ones included. Returns the responses that train now. Collective."""
    fresh = next_prompts(open_responses.vacancies)
    drawn, found, tokens, moved = sampler.continue_open(
        open_responses,
        fresh,
        sampling,
        seed_step=seed_step,
        timer=timer,
        show=lambda rows: shown_rows(rows, config.run.samples_per_step),
    )
    counts = SamplingCounts(rounds=1, prompts_tried=len(fresh), horizon=found).with_responses([drawn])
    counts = replace(counts, tokens=found.sampled, moved_tokens=moved)
    if config.rollout.environment is not None:
        return drawn, counts
    return drawn, counts.with_occupancy(tokens, sampler.engine.max_running)


def _collect_groups(config: Config, draw: Callable[[int], Round]) -> tuple[Round, SamplingCounts]:
    """Draw rounds until the batch has enough informative groups (dynamic sampling). ``draw`` samples a number of prompts. Collective."""
    size = config.batch.responses_per_prompt
    settings = config.rollout.dynamic_sampling
    collector = GroupCollector(target=config.batch.prompts_per_step, max_rounds=settings.max_rounds)
    rounds: list[Round] = []
    while (prompts := collector.next_draw()) > 0:
        rounds.append(draw(prompts))
        if world()[0] == 0:
            rows = rounds[-1].rows
            scores = rows.score + rows.step_reward if settings.keep == "different_scores" else rows.verdict.float()
            collector.add_round(*(column.view(-1, size).tolist() for column in (rows.verdict, rows.graded, scores)))
        collector = broadcast_object(collector)
    if collector.exhausted and settings.on_exhausted == "stop":
        raise StepAbandoned(
            f"dynamic sampling kept {len(collector.kept)} of {collector.target} prompts after {collector.rounds} rounds "
            f"({collector.tried} prompts tried, {collector.all_right} groups all right, {collector.all_wrong} all wrong, "
            f"{collector.ungraded} without a verdict), and "
            "rollout.dynamic_sampling.on_exhausted = 'stop'; use easier or harder data, raise max_rounds, or set on_exhausted to 'train' "
            "to train on the groups kept"
        )
    dropped = (collector.all_right, collector.all_wrong, collector.ungraded, collector.surplus)
    counts = SamplingCounts(collector.rounds, collector.tried, *dropped).with_responses(rounds)
    return keep_groups(rounds, collector.kept), counts
