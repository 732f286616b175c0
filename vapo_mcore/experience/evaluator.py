"""Sample and grade the evaluation sets in chunks, both during training and for ``vapo-mcore eval``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vapo_mcore.collectives import broadcast_object, fail_together, gather_objects
from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.environments.types import ANSWER_START
from vapo_mcore.evaluation.statistics import Summary, summarise
from vapo_mcore.evaluation.store import ResponseStore
from vapo_mcore.experience.collecting import shown_rows
from vapo_mcore.experience.sampling import ResponseSampler
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rewards import GradeItem, knows_answers, stated_answer
from vapo_mcore.rollout.base import SamplingConfig

EVALUATION_SEED_STEP = 0
"""Rollouts use seed steps from 1, so evaluations share no seed with training. All evaluations of a run use the same seeds."""

_TEXTS = ("prompt", "response", "ground_truth")


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation.

    ``summaries`` (one per set), ``metrics`` (for the step's row) and ``seconds`` (by phase) are on all ranks; ``records`` of the
    responses only on rank 0.
    """

    summaries: list[Summary]
    metrics: dict[str, float | int | None]
    seconds: dict[str, float]
    records: list[dict[str, Any]]


class Evaluator:
    """Samples and grades ``eval.samples_per_prompt`` responses to every evaluation prompt. Collective over all ranks.

    Prompts are processed in chunks of at most ``eval.responses_per_chunk`` responses per replica. The chunks depend only on the
    configuration and the number of replicas.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]) -> None:
        self.config = config
        self.prompts = first_of_each_set(prompts, config.eval.max_prompts)
        self.samples = config.eval.samples_per_prompt
        self.sampling = SamplingConfig(
            temperature=config.eval.temperature, top_p=config.eval.top_p, top_k=-1, max_tokens=config.rollout.max_response_length
        )

    def chunks(self, replicas: int) -> list[range]:
        """Return the prompt indices of each chunk."""
        size = max(1, self.config.eval.responses_per_chunk * replicas // self.samples)
        return [range(start, min(start + size, len(self.prompts))) for start in range(0, len(self.prompts), size)]

    def run(self, sampler: ResponseSampler) -> Evaluation:
        """Evaluate with the engine's current weights. Keeps the texts of ``run.samples_per_step`` responses."""
        show = shown_rows(len(self.prompts) * self.samples, self.config.run.samples_per_step)
        records: list[dict[str, Any]] = []
        seconds: dict[str, float] = {}
        for chunk in self.chunks(sampler.engine.num_replicas):
            found, took = self._sample(sampler, chunk, show)
            records += found
            seconds = add_seconds(seconds, took)
        return self._evaluation(records, seconds)

    def run_stored(
        self, sampler: ResponseSampler | None, store: ResponseStore | None, done: int, chunks: list[range], say: Callable[[str], None]
    ) -> Evaluation:
        """Evaluate the chunks after the first ``done``, which the store contains already. Keeps the texts of all responses.

        ``sampler`` may be None if the store contains all chunks, and ``store`` is None on ranks other than 0. ``say`` prints a line
        after each chunk.
        """
        for number, chunk in enumerate(chunks[done:], start=done + 1):
            everything = range(chunk.start * self.samples, chunk.stop * self.samples)
            assert sampler is not None, "chunks are missing"
            found, took = self._sample(sampler, chunk, everything)
            with fail_together():
                if store is not None:
                    store.append(found, took)
            say(f"chunk {number}/{len(chunks)}: {len(everything)} responses, {took['total']:.1f} s")
        records: list[dict[str, Any]] = []
        seconds: dict[str, float] = {}
        if store is not None:
            records = store.records()
            for stored in store.chunks:
                seconds = add_seconds(seconds, stored.seconds)
        return self._evaluation(records, seconds)

    def _sample(self, sampler: ResponseSampler, chunk: range, texts: Collection[int]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Sample a chunk. Returns its records in order (empty except on rank 0) and this rank's seconds by phase."""
        timer = PhaseTimer()
        prompts = self.prompts[chunk.start : chunk.stop]
        everything = range(len(prompts) * self.samples)
        sampled = sampler.sample(prompts, self.samples, self.sampling, seed_step=EVALUATION_SEED_STEP, timer=timer, show=everything)
        first = chunk.start * self.samples
        mine = {
            row: record_of(prompts[row // self.samples], shown, with_texts=first + row in texts) for row, shown in sampled.shown.items()
        }
        parts = gather_objects(mine)
        together = {} if parts is None else {row: record for part in parts for row, record in part.items()}
        assert parts is None or len(together) == len(everything), "a response was lost in the gather"
        return [together[row] for row in sorted(together)], timer.seconds | {"total": timer.total}

    def _evaluation(self, records: list[dict[str, Any]], seconds: dict[str, float]) -> Evaluation:
        """Compute summaries and metrics on rank 0, which has the records, and broadcast them."""
        summaries, seconds = broadcast_object((summarise(records, self.samples, self.config.seed), seconds))
        metrics: dict[str, float | int | None] = {}
        for summary in summaries:
            metrics |= metrics_of(summary)
        metrics["time/eval"] = seconds.get("total", 0.0)
        return Evaluation(summaries, metrics, seconds, records)

    def fingerprint(self) -> str:
        """Return a digest of the prompts, in order, with their ground truths and verifiers."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(repr((prompt.prompt_id, prompt.token_ids, prompt.ground_truth, prompt.verifier, prompt.subsets)).encode())
        return digest.hexdigest()[:32]


def evaluation_settings(config: Config) -> dict[str, Any]:
    """Return the sampling settings, for reports and to check that a resumed evaluation uses the same ones."""
    environment = config.rollout.environment
    turns = {} if environment is None else {"environment": environment.name, "max_turns": environment.max_turns}
    return turns | {
        "samples_per_prompt": config.eval.samples_per_prompt,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p if config.eval.temperature else 1.0,
        "max_response_length": config.rollout.max_response_length,
        "seed": config.seed,
        "engine": config.rollout.engine,
        "dtype": config.model.dtype,
    }


def record_of(prompt: Prompt, shown: Mapping[str, Any], *, with_texts: bool) -> dict[str, Any]:
    """Convert a sampler's record of one response to an evaluation record (see ``evaluation.statistics``)."""
    names = ("prompt_id", "sample_index", "source", "correct", "score", "error", "ungraded")
    record: dict[str, Any] = {name: shown[name] for name in names}
    if knows_answers(prompt.verifier):
        metadata = {**prompt.metadata, ANSWER_START: shown["answer_start"]}
        record["answer"] = stated_answer(GradeItem(prompt.verifier, shown["response"], prompt.ground_truth, metadata))
    record |= {name: shown[name] for name in ("finish_reason", "response_length")}
    record |= {"prompt_length": len(prompt.token_ids), "subsets": prompt.subsets}
    return record | ({name: shown[name] for name in _TEXTS} if with_texts else {})


def metrics_of(summary: Summary) -> dict[str, float | int | None]:
    """Return the metrics ``eval/<set>/...`` of a step's row."""
    average = summary.average
    metrics: dict[str, float | int | None] = {
        name: None if found is None else found.value
        for name, found in summary.scores.items()
        if not name.startswith("pass@") or name == f"pass@{summary.samples}"
    }
    metrics |= {
        "ci_low": None if average is None else average.low,
        "ci_high": None if average is None else average.high,
        "prompts": 0 if average is None else average.problems,
        "failed": summary.failed,
        "length_mean": summary.lengths.mean,
        "length_max": summary.lengths.max,
        "truncated_frac": summary.truncated,
    }
    return {f"eval/{summary.name}/{name}": value for name, value in metrics.items()}


def add_seconds(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Add seconds by phase."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def first_of_each_set(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Return the first ``count`` prompts of each set (all if None), in order."""
    if count is None:
        return list(prompts)
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.source] = seen.get(prompt.source, 0) + 1
        if seen[prompt.source] <= count:
            chosen.append(prompt)
    return chosen
