"""Sampling and grading: requests are shared out over the rollout replicas, each replica's first rank grades what it sampled.

Rows (one a response) become known to all ranks; token tensors stay on the rank that holds them until they are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.data.prompts import Prompt, split_evenly
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows, gather_rows
from vapo_mcore.errors import EngineFailure, RewardError, StepAbandoned
from vapo_mcore.rewards.pool import GradeItem, Verdict, VerifierPool
from vapo_mcore.rollout.base import Generation, GenerationRequest, RolloutEngine, SamplingConfig
from vapo_mcore.rollout.seeds import sampling_seed
from vapo_mcore.trainer.collectives import all_gather_objects
from vapo_mcore.trainer.timing import PhaseTimer


@dataclass(frozen=True)
class Round:
    """Graded responses to some prompts.

    Attributes:
        rows: all responses, replicated, prompt after prompt; ``group`` is the prompt's number; ``reward`` is still the raw score.
        holder: int64 [n], the rank whose ``local`` holds each row's tokens.
        local: the rows that this rank holds (none on a rank that does not lead its replica).
        shown: text records of the rows that were to be shown and that this rank holds, by row id.
    """

    rows: Rows
    holder: Tensor
    local: RolloutBatch
    shown: dict[int, dict[str, Any]]


class ResponseSampler:
    """Draws graded responses from the rollout engine; used by training, value pretraining and evaluation alike."""

    def __init__(self, engine: RolloutEngine, verifiers: VerifierPool | None, tokenizer: Any, run_seed: int) -> None:
        """``verifiers`` is None on ranks that do not lead a replica. ``recover_engine`` is the trainer's, which has the weights: it is
        called on all ranks with what went wrong on which of them, and returns with an engine that can generate, or raises."""
        self.recover_engine: Callable[[dict[int, str], PhaseTimer], None] = _no_recovery
        self.grader_restarts = 0  # of all replicas, since it was last set to 0
        self.engine = engine
        self.verifiers = verifiers
        self.tokenizer = tokenizer
        self.run_seed = run_seed

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        sampling: SamplingConfig,
        *,
        seed_step: int,
        timer: PhaseTimer,
        show: Collection[int] = (),
    ) -> Round:
        """Sample and grade ``samples_per_prompt`` responses to each prompt. A collective over all ranks.

        ``seed_step`` enters the sampling seeds; ``show``: numbers of rows whose texts are kept for the samples file.

        Raises StepAbandoned on all ranks when an engine or the graders of a replica are gone for good.
        """
        with timer.phase("generate"):
            requests = [
                GenerationRequest(
                    prompt_id=prompt.prompt_id,
                    sample_index=index,
                    prompt_token_ids=prompt.token_ids,
                    seed=sampling_seed(self.run_seed, seed_step, prompt.prompt_id, index),
                )
                for prompt in prompts
                for index in range(samples_per_prompt)
            ]
            # Contiguous parts: the responses to one prompt mostly meet in one replica's prefix cache.
            mine = split_evenly(len(requests), self.engine.num_replicas)[self.engine.replica_index]
        while True:
            with timer.phase("generate"):
                generations, broken = self._generate([requests[number] for number in mine], sampling)
            with timer.phase("reward"):
                numbers, responses = (list(mine), generations) if self.engine.is_replica_leader and broken is None else ([], [])
                local, shown, ungradable = self._try_to_grade(prompts, samples_per_prompt, numbers, responses, show)
                # Told only now: a replica that is ready first grades while the others still generate.
                failures = self._tell(broken, ungradable)
                if not failures:
                    rows, holder = gather_rows(local)
                    return Round(rows, holder, local, shown)
            self.recover_engine(failures, timer)  # the same requests with the same seeds again, on every rank

    def _generate(self, requests: list[GenerationRequest], sampling: SamplingConfig) -> tuple[list[Generation], str | None]:
        """This replica's responses, or what went wrong on this rank."""
        try:
            return (self.engine.generate(requests, sampling) if requests else []), None
        except EngineFailure as error:
            return [], str(error)

    def _tell(self, broken: str | None, ungradable: str | None) -> dict[int, str]:
        """What went wrong with the engine on which rank; a collective. Raises StepAbandoned on all ranks if one cannot grade any more."""
        restarts = self.verifiers.take_restarts() if self.verifiers is not None else 0
        told = all_gather_objects((broken, ungradable, restarts))
        self.grader_restarts += sum(restarts for _, _, restarts in told)
        without_graders = {rank: text for rank, (_, text, _) in enumerate(told) if text is not None}
        if without_graders:
            raise StepAbandoned("; ".join(f"rank {rank}: {text}" for rank, text in without_graders.items()))
        return {rank: text for rank, (text, _, _) in enumerate(told) if text is not None}

    def _try_to_grade(self, *arguments: Any) -> tuple[RolloutBatch, dict[int, dict[str, Any]], str | None]:
        try:
            return *self._grade(*arguments), None
        except RewardError as error:
            return _no_rows(), {}, str(error)

    def _grade(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, numbers: list[int], responses: list[Generation], show: Collection[int]
    ) -> tuple[RolloutBatch, dict[int, dict[str, Any]]]:
        """Verdicts of the responses that this rank leads, as rows with their tokens."""
        asked = [prompts[number // samples_per_prompt] for number in numbers]
        texts = [self.tokenizer.decode(response.token_ids, skip_special_tokens=True) for response in responses]
        items = [
            GradeItem(verifier=prompt.verifier, response=text, ground_truth=prompt.ground_truth, metadata=prompt.metadata)
            for prompt, text in zip(asked, texts, strict=True)
        ]
        verdicts: list[Verdict] = []
        if items:
            assert self.verifiers is not None, "the first rank of a replica grades, so it needs verifiers"
            verdicts = self.verifiers.grade(items)
        rows = _rows(asked, [number // samples_per_prompt for number in numbers], responses, verdicts)
        local = RolloutBatch.from_responses(
            rows,
            [prompt.token_ids for prompt in asked],
            [response.token_ids for response in responses],
            [response.logprobs for response in responses],
            row_ids=torch.tensor(numbers, dtype=torch.int64),
        )
        shown = {
            number: _record(prompt, response, text, verdict)
            for number, prompt, response, text, verdict in zip(numbers, asked, responses, texts, verdicts, strict=True)
            if number in show
        }
        return local, shown


def _no_recovery(failures: dict[int, str], timer: PhaseTimer) -> None:
    raise StepAbandoned("the rollout engine failed: " + "; ".join(f"rank {rank}: {text}" for rank, text in failures.items()))


def _no_rows() -> RolloutBatch:
    return RolloutBatch.from_responses(Rows.empty(), [], [], [])


def _rows(prompts: list[Prompt], groups: list[int], responses: list[Generation], verdicts: list[Verdict]) -> Rows:
    scores = torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float32)
    return Rows(
        prompt_id=[prompt.prompt_id for prompt in prompts],
        group=torch.tensor(groups, dtype=torch.int64),
        sample_index=torch.tensor([response.request.sample_index for response in responses], dtype=torch.int64),
        verdict=torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool),
        graded=torch.tensor([verdict.error is None for verdict in verdicts], dtype=torch.bool),
        score=scores,
        reward=scores.clone(),
        finish_reason=[response.finish_reason for response in responses],
        prompt_length=torch.tensor([len(prompt.token_ids) for prompt in prompts], dtype=torch.int64),
        response_length=torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int64),
        source=[prompt.source for prompt in prompts],
    )


def _record(prompt: Prompt, response: Generation, text: str, verdict: Verdict) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "sample_index": response.request.sample_index,
        "source": prompt.source,
        "prompt": prompt.text,
        "response": text,
        "ground_truth": prompt.ground_truth,
        "correct": verdict.correct,
        "score": verdict.score,
        "error": verdict.error,
        "finish_reason": response.finish_reason,
        "response_length": len(response.token_ids),
    }


def keep_groups(rounds: Sequence[Round], kept: Sequence[tuple[int, int]]) -> Round:
    """The chosen (round, group) pairs as one round: rows renumbered in that order, groups 0, 1, 2, ..."""
    offsets = torch.tensor([0, *(len(part.rows) for part in rounds)]).cumsum(0)
    members = []
    for number, group in kept:
        inside = (rounds[number].rows.group == group).nonzero().flatten()
        members.append(inside + offsets[number])
    chosen = torch.cat([torch.empty(0, dtype=torch.int64), *members])
    groups = torch.repeat_interleave(torch.arange(len(members)), torch.tensor([m.numel() for m in members], dtype=torch.int64))
    rows = replace(Rows.concat([part.rows for part in rounds]).select(chosen), group=groups)
    holder = torch.cat([part.holder for part in rounds])[chosen]
    new_id = torch.full((int(offsets[-1]),), -1, dtype=torch.int64)
    new_id[chosen] = torch.arange(chosen.numel())
    held = [
        RolloutBatch(part.local.rows, part.local.cu_seqlens, part.local.tensors, part.local.row_ids + offset)
        for part, offset in zip(rounds, offsets[:-1], strict=True)
    ]
    local = RolloutBatch.concat(held)
    local = local.select((new_id[local.row_ids] >= 0).nonzero().flatten())
    ids = new_id[local.row_ids]
    local = RolloutBatch(replace(local.rows, group=groups[ids]), local.cu_seqlens, local.tensors, ids)
    shown = {
        int(new_id[row + int(offset)]): record
        for part, offset in zip(rounds, offsets[:-1], strict=True)
        for row, record in part.shown.items()
        if new_id[row + int(offset)] >= 0
    }
    return Round(rows, holder, local, shown)
