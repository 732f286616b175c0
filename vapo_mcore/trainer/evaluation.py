"""Held-out evaluation: avg@k by set with an interval, every item counted once, kept apart by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.rollout.base import SamplingConfig
from vapo_mcore.trainer.collectives import all_gather_objects
from vapo_mcore.trainer.intervals import wilson_interval
from vapo_mcore.trainer.sampling import ResponseSampler
from vapo_mcore.trainer.timing import PhaseTimer

EVALUATION_SEED_STEP = 0
"""Rollouts count from 1, so evaluations share no seed with training; all evaluations of a run draw with the same seeds."""


@dataclass(frozen=True)
class SetResult:
    """Evaluation of one set. ``accuracy`` (avg@k) and its interval are None if no response was graded.

    ``prompts`` counts the problems with at least one graded response, ``failed`` the responses without a verdict.
    """

    accuracy: float | None
    low: float | None
    high: float | None
    prompts: int
    failed: int
    length_mean: float
    truncated_frac: float

    def __str__(self) -> str:
        if self.accuracy is None:
            return "no verdicts"
        return f"{self.accuracy:.3f} (95 % interval {self.low:.3f} - {self.high:.3f}, {self.prompts} problems)"


@dataclass(frozen=True)
class Evaluation:
    """Results by set, the metrics for the step's row, and a record of every response (on all ranks; texts of some)."""

    results: dict[str, SetResult]
    metrics: dict[str, float | int | None]
    records: list[dict[str, Any]]


class Evaluator:
    """Samples ``eval.samples_per_prompt`` responses to every evaluation prompt; a collective over all ranks."""

    def __init__(self, config: Config, sampler: ResponseSampler, prompts: Sequence[Prompt]) -> None:
        self.settings = config.eval
        self.sampler = sampler
        self.prompts = first_of_each_set(prompts, config.eval.max_prompts)
        self.shown = config.run.samples_per_step
        self.sampling = SamplingConfig(
            temperature=config.eval.temperature, top_p=config.eval.top_p, top_k=-1, max_tokens=config.rollout.max_response_length
        )

    def run(self) -> Evaluation:
        timer = PhaseTimer()
        size = self.settings.samples_per_prompt
        total = len(self.prompts) * size
        show = {number * total // self.shown for number in range(min(self.shown, total))} if self.shown else set()
        sampled = self.sampler.sample(self.prompts, size, self.sampling, seed_step=EVALUATION_SEED_STEP, timer=timer, show=show)
        texts = {row: record for part in all_gather_objects(sampled.shown) for row, record in part.items()}
        results = summarise(sampled.rows)
        metrics: dict[str, float | int | None] = {}
        for name, result in results.items():
            metrics |= {
                f"eval/{name}/avg@{size}": result.accuracy,
                f"eval/{name}/ci_low": result.low,
                f"eval/{name}/ci_high": result.high,
                f"eval/{name}/prompts": result.prompts,
                f"eval/{name}/failed": result.failed,
                f"eval/{name}/length_mean": result.length_mean,
                f"eval/{name}/truncated_frac": result.truncated_frac,
            }
        metrics["time/eval"] = timer.total
        return Evaluation(results, metrics, _records(sampled.rows, texts))


def first_of_each_set(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """The first ``count`` prompts of each set (all if None), in order."""
    if count is None:
        return list(prompts)
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.source] = seen.get(prompt.source, 0) + 1
        if seen[prompt.source] <= count:
            chosen.append(prompt)
    return chosen


def summarise(rows: Rows) -> dict[str, SetResult]:
    """avg@k of each set: the mean over problems of the mean verdict of their graded responses, with a Wilson interval."""
    results = {}
    for source in dict.fromkeys(rows.source):
        mine = torch.tensor([other == source for other in rows.source])
        group, graded, right = rows.group[mine], rows.graded[mine], (rows.verdict & rows.graded)[mine]
        _, number = torch.unique(group, return_inverse=True)
        zeros = torch.zeros(int(number.max()) + 1, dtype=torch.float64)
        counts = zeros.index_add(0, number, graded.double())
        rights = zeros.index_add(0, number, right.double())
        known = counts > 0
        problems = int(known.sum())
        successes = float((rights[known] / counts[known]).sum())
        low, high = wilson_interval(min(successes, problems), problems) if problems else (None, None)
        results[source] = SetResult(
            accuracy=successes / problems if problems else None,
            low=low,
            high=high,
            prompts=problems,
            failed=int((~graded).sum()),
            length_mean=float(rows.response_length[mine].double().mean()),
            truncated_frac=float(rows.truncated[mine].double().mean()),
        )
    return results


def _records(rows: Rows, texts: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    columns = zip(
        rows.prompt_id,
        rows.sample_index.tolist(),
        rows.source,
        rows.verdict.tolist(),
        rows.score.tolist(),
        rows.graded.tolist(),
        rows.finish_reason,
        rows.response_length.tolist(),
        strict=True,
    )
    names = ("prompt_id", "sample_index", "source", "correct", "score", "graded", "finish_reason", "response_length")
    return [dict(zip(names, values, strict=True)) | texts.get(row, {}) for row, values in enumerate(columns)]
