"""Rollout engine against trainer: weights after a sync, log-probs of the engine's own samples, full distributions on fixed texts; again
after a sync of perturbed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.distances import chosen, distance
from vapo_mcore.certify.perturbed import perturbed_policy
from vapo_mcore.certify.record import Measurement, NotApplicable, fails, holds, not_applicable
from vapo_mcore.certify.tolerances import BY_NAME, judge
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.errors import EngineFailure, RolloutError
from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig
from vapo_mcore.rollout.seeds import sampling_seed

PROMPTS, SAMPLES, MOST_SAMPLED = 8, 2, 64
OTHER_TEMPERATURE = 0.7
"""Sampled at, too, where the recipe samples at 1: log-probs that ignore the temperature are right there by chance."""
NOTABLE, RAW = 0.2, 0.5
"""A mean |dlogp| from this part of its tolerance on is compared with that at temperature 1, which is less than this part of it only where
the engine ignores the temperature."""
REMEDY = (
    "the engine does not hold the trainer's weights, or computes another model: where the checksums are equal and its parameters cannot be "
    "read, look at its version, its weight loader and rollout.vllm"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Gap:
    """|dlogp| of sampled tokens over all replicas; ``where``: the largest."""

    tokens: int
    mean: float
    largest: float
    where: str


def run(bench: Bench) -> list[Measurement]:
    """Check the recipe's weights, then perturbed ones (a stale or half-loaded engine differs there), then the recipe's again."""
    _ = bench.sync  # what cannot be built is no finding about weights
    found = _synced(bench, "the recipe's weights", keep=True)
    if any(measurement.verdict == "fails" for measurement in found):
        return found
    with perturbed_policy(bench):
        found += _synced(bench, "perturbed weights", keep=False)
    bench.sync_weights()
    return found


def _synced(bench: Bench, which: str, *, keep: bool) -> list[Measurement]:
    """Sync and compare; a sync that is refused is the finding. ``keep``: checksums and log-probs go into the certificate."""
    try:
        bench.sync_weights()
    except RolloutError as error:
        remedy = "the engine does not hold what the trainer has in the tensors named: look at its version and its weight loader"
        return [fails(f"weight sync, {which}", str(error), "equal checksums of all tensors", remedy)]
    rollout = bench.config.rollout
    # The other temperature once: how log-probs are processed does not depend on the weights.
    temperatures = [rollout.temperature] + ([OTHER_TEMPERATURE] if keep and rollout.temperature == 1.0 else [])
    found = [_checksums(bench, which)]
    # First everything of the engine, then everything of the trainer, for which the engine sleeps.
    samples = [_drawn(bench, temperature) for temperature in temperatures]
    # Full distributions are slow to get from an engine: perturbed weights on the first text and the drawn ones.
    texts = list(range(len(bench.sequences))) if keep else sorted({0, *range(len(bench.sequences))[-2:]})
    theirs = together(lambda: bench.engine.distributions([bench.sequences[text] for text in texts]))
    found += [_ends(bench, samples[0])] if keep else []
    for temperature, generations in zip(temperatures, samples, strict=True):
        found += _sampled(bench, generations, temperature, which)
    if keep:
        bench.details["checksums"] = bench.engine.last_sync.checksums  # type: ignore[union-attr]
        bench.details["logprobs"] = chosen(theirs, bench.sequences)
    return found + _full(bench, theirs, texts, which)


def _drawn(bench: Bench, temperature: float) -> list[Generation]:
    return together(lambda: sample(bench, temperature))


def together(run: Callable[[], _T]) -> _T:
    """Return the result of ``run``; an EngineFailure on any rank is raised on all ranks."""
    failure: str | None = None
    result: list[_T] = []
    try:
        result.append(run())
    except EngineFailure as error:
        failure = str(error)
    failures = [text for text in all_gather_objects(failure) if text is not None]
    if failures:
        raise EngineFailure(f"the engine failed: {failures[0]}")
    return result[0]


def _checksums(bench: Bench, which: str) -> Measurement:
    report, engine = bench.engine.last_sync, bench.engine
    assert report is not None and report.checksums is not None, "a verified sync has checksums"
    name, (shape, dtype) = next(iter(bench.sync.exporter.manifest.items()))
    readable = engine.holds(name, torch.zeros(shape, dtype=dtype, device=bench.parallel.device)) is not None
    values = "the engine's own parameters are equal" if readable else "the engine's own parameters are not readable (vLLM on CPU)"
    shown = f"{report.names} tensors, {report.bytes:,} bytes, equal checksums; {values}"
    return holds(f"weight sync, {which}", shown, "every bit", float(report.names))


def sample(bench: Bench, temperature: float) -> list[Generation]:
    """Responses of this rank's replica to its share of some prompts' requests, at least one. No collective over replicas."""
    longest = min(MOST_SAMPLED, bench.config.rollout.max_response_length)
    how = SamplingConfig(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=longest)
    requests = [
        GenerationRequest(prompt.prompt_id, index, prompt.token_ids, sampling_seed(bench.config.seed, 0, prompt.prompt_id, index))
        for prompt in bench.checked_prompts(PROMPTS)
        for index in range(SAMPLES)
    ]
    index, count = bench.engine.replica_index, bench.engine.num_replicas
    return bench.engine.generate(requests[index % len(requests) :: count], how)


def _sampled(bench: Bench, generations: Sequence[Generation], temperature: float, which: str) -> list[Measurement]:
    """Log-probs of sampled tokens, and whether they are those of the temperature that was asked for."""
    samples = _own_share(bench, generations)
    gap = _compare(bench, samples, temperature)
    label, remedy = f"sampled tokens at T = {temperature:g}, {which}", REMEDY
    mean = judge(f"mean |dlogp|, {label}", gap.mean, "engine/mean", bench.dtype, remedy=remedy, suffix=f" over {gap.tokens} tokens")
    if temperature != 1.0 and gap.mean > NOTABLE * BY_NAME["engine/mean"].limit(bench.dtype):
        raw = _compare(bench, samples, 1.0).mean
        if raw < RAW * gap.mean:  # also where rounding in bfloat16 would excuse the difference
            remedy = f"the engine's log-probs are those of temperature 1, not of {temperature:g}: it must return processed log-probs"
            mean = replace(mean, verdict="fails", measured=f"{mean.measured}, {raw:.3g} to the trainer's of T = 1", remedy=remedy)
    return [
        mean,
        judge(f"max |dlogp|, {label}", gap.largest, "engine/max", bench.dtype, remedy=remedy, suffix=f" at {gap.where}"),
    ]


def _own_share(bench: Bench, generations: Sequence[Generation]) -> list[Generation]:
    """This data-parallel rank's part of all replicas' different samples, as many as every other rank's (some twice). A collective."""
    by_replica = dict(all_gather_objects((bench.engine.replica_index, list(generations))))
    drawn = [generation for replica in sorted(by_replica) for generation in by_replica[replica] if generation.token_ids]
    # With more replicas than requests some have the same one: where they agree bit for bit, one of them is compared.
    samples = list({(one.request.prompt_id, one.request.sample_index, *one.token_ids, *one.logprobs): one for one in drawn}.values())
    if not samples:
        raise NotApplicable("the engine sampled no token")
    parallel = bench.parallel
    share = -(-len(samples) // parallel.data_parallel_size)
    first = parallel.data_parallel_rank * share
    return [samples[number % len(samples)] for number in range(first, first + share)]


def _compare(bench: Bench, samples: Sequence[Generation], temperature: float) -> _Gap:
    """Compare this rank's samples with the trainer, and put the ranks' results together. A collective."""
    sequences = [[*sample.request.prompt_token_ids, *sample.token_ids] for sample in samples]
    with bench.on_device("logprobs") as models:
        logprobs = models.policy.forward(bench.microbatches(sequences), temperature=temperature)["logprobs"]
    largest, where, total, tokens = 0.0, "-", 0.0, 0
    for generation, own in zip(samples, logprobs, strict=False):  # behind them: dummies of a pipeline schedule
        start = len(generation.request.prompt_token_ids)
        gaps = (own[start:].cpu().double() - torch.tensor(generation.logprobs, dtype=torch.float64)).abs()
        total += float(gaps.sum())
        tokens += len(gaps)
        if not math.isnan(largest) and not float(gaps.max()) <= largest:
            largest, position = float(gaps.max()), int(gaps.argmax())
            where = f"{generation.request.prompt_id} sample {generation.request.sample_index}, token {position}"
    # The ranks of a model's other parallel dimensions have the same samples.
    by_data_rank = dict(all_gather_objects((bench.parallel.data_parallel_rank, _Gap(tokens, total / tokens, largest, where))))
    ranks = list(by_data_rank.values())
    tokens = sum(gap.tokens for gap in ranks)
    worst = max(ranks, key=lambda gap: (math.isnan(gap.largest), gap.largest))
    return _Gap(tokens, sum(gap.mean * gap.tokens for gap in ranks) / tokens, worst.largest, worst.where)


def _full(bench: Bench, theirs: Sequence[Tensor], texts: Sequence[int], which: str) -> list[Measurement]:
    """Distributions of the whole vocabulary on some of the fixed texts."""
    apart = distance(theirs, bench.trainer_distributions(texts))
    suffix = f", largest |dlogp| {apart.largest:.3g} at text {texts[apart.where[0]]}, position {apart.where[1]}"
    found = [judge(f"KL of full distributions, {which}", apart.kl, "engine/kl", bench.dtype, remedy=REMEDY, suffix=suffix)]
    if apart.support:
        found.append(fails(f"support, {which}", f"{apart.support} ids have a probability on one side only", "none", REMEDY))
    return found


def _ends(bench: Bench, generations: Sequence[Generation]) -> Measurement:
    """Check that each stopped response ends with a stop id and has none before."""
    what, stopping = "where responses end", set(bench.engine.settings()["stop_token_ids"])
    if bench.config.rollout.stop:
        return not_applicable(what, "rollout.stop ends responses by their texts, too")
    wrong = [
        generation.request.prompt_id
        for generation in generations
        if stopping & set(generation.token_ids[:-1]) or (generation.finish_reason == "stop") != (generation.token_ids[-1] in stopping)
    ]
    stopped = sum(generation.finish_reason == "stop" for generation in generations)
    if wrong:
        return fails(what, f"responses to {', '.join(wrong[:4])} go on after a stop id, or stop without one", "stop ids", REMEDY)
    if not stopped:
        return not_applicable(what, f"none of {len(generations)} responses of at most {MOST_SAMPLED} tokens ended by itself")
    return holds(what, f"{stopped} of {len(generations)} responses ended with a stop id", "stop ids", float(stopped))
