"""Sample and grade responses: requests are split over the rollout replicas, and each replica's leader grades its responses.

Rows (one per response) are gathered on all ranks. Token tensors stay on the rank that sampled them until they are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.collectives import all_gather_objects, world
from vapo_mcore.config.architecture import ExpertChoices
from vapo_mcore.data.prompts import Prompt, split_evenly
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows, gather_rows
from vapo_mcore.environments.types import Reply, TurnRequest
from vapo_mcore.errors import EngineFailure, RewardError, StepAbandoned, VapoError
from vapo_mcore.experience.open_responses import HorizonCounts, Key, OpenResponse, OpenResponses, Segment
from vapo_mcore.experience.responses import ANYWHERE, Response, grade_responses, response_rows, sample_record, step_rewards
from vapo_mcore.records.timing import PhaseTimer
from vapo_mcore.rewards.pool import VerifierPool
from vapo_mcore.rewards.region import AnswerRegion
from vapo_mcore.rollout.base import Generation, GenerationRequest, RolloutEngine, SamplingConfig, Trajectory
from vapo_mcore.rollout.multi_turn import Generate, MultiTurn, Respond
from vapo_mcore.rollout.seeds import sampling_seed

RecoverEngine = Callable[[dict[int, str], PhaseTimer], None]


def _replica_group(engine: RolloutEngine) -> dist.ProcessGroup | None:
    """Return the process group of this rank's replica (contiguous ranks), or None if the replica is a single rank. Collective."""
    rank, size = world()
    width = size // engine.num_replicas
    if width == 1:
        return None
    groups = [dist.new_group(list(range(first, first + width))) for first in range(0, size, width)]
    return groups[rank // width]


@dataclass(frozen=True)
class Round:
    """Graded responses to some prompts.

    Attributes:
        rows: all responses, replicated, ordered by prompt; ``group`` is the index of the prompt; ``reward`` is still the raw score.
        holder: int64 [n], the rank whose ``local`` holds each row's tokens.
        local: the rows held by this rank (empty unless it leads its replica).
        shown: sample records of the rows in ``show`` held by this rank, by row id.
    """

    rows: Rows
    holder: Tensor
    local: RolloutBatch
    shown: dict[int, dict[str, Any]]


class ResponseSampler:
    """Samples responses from the rollout engine and grades them, for training, value pretraining and evaluation."""

    def __init__(
        self,
        engine: RolloutEngine,
        verifiers: VerifierPool | None,
        tokenizer: Any,
        run_seed: int,
        multi_turn: MultiTurn | None = None,
        region: AnswerRegion = ANYWHERE,
        end_texts: Sequence[str] = (),
        recover_engine: RecoverEngine | None = None,
    ) -> None:
        """Collective. ``verifiers`` is None on ranks that do not lead a replica. With ``multi_turn``, responses have several turns.

        ``recover_engine`` is called on all ranks with the error messages by rank, and either restores a working engine or raises. Without
        it, a failed engine ends the run.
        """
        self._recover = recover_engine or _no_recovery
        self.engine_rebuilds = 0  # this counter and the next: since the last take_recoveries
        self.grader_restarts = 0  # over all replicas
        self.engine = engine
        self.verifiers = verifiers
        self.tokenizer = tokenizer
        self.run_seed = run_seed
        self.multi_turn = multi_turn
        self.region = region
        self.end_texts = end_texts
        self._replica_group = _replica_group(engine) if multi_turn is not None else None

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
        """Sample and grade ``samples_per_prompt`` responses to each prompt. Collective over all ranks.

        ``seed_step`` seeds the sampling. ``show``: row numbers whose texts are kept for the samples file.

        Raises StepAbandoned on all ranks if an engine cannot be recovered or the graders of a replica cannot be restarted.
        """
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
        # Contiguous parts: most responses to one prompt share one replica's prefix cache.
        mine = split_evenly(len(requests), self.engine.num_replicas)[self.engine.replica_index]
        my_prompts = [prompts[number // samples_per_prompt] for number in mine]
        while True:
            trajectories, engine_error, reward_error = self._try_play([requests[number] for number in mine], my_prompts, sampling, timer)
            with timer.phase("reward"):
                leads = self.engine.is_replica_leader and engine_error is None and reward_error is None
                numbers, led = (list(mine), trajectories) if leads else ([], [])
                groups = [number // samples_per_prompt for number in numbers]
                choices = self.engine.expert_choices if sampling.return_experts else None
                local, shown, grading_error = self._try_grade(numbers, groups, my_prompts if leads else [], led, show, choices)
                # Exchange errors only after grading: a replica that is ready first grades while the others still generate.
                failures = self._gather_failures(engine_error, reward_error or grading_error)
                if not failures:
                    rows, holder = gather_rows(local)
                    return Round(rows, holder, local, shown)
            self._recover_engine(failures, timer)  # then repeat the same requests with the same seeds on every rank

    def continue_open(
        self,
        responses: OpenResponses,
        drawn: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        seed_step: int,
        timer: PhaseTimer,
        show: Callable[[int], Collection[int]],
    ) -> tuple[Round, HorizonCounts, list[list[int]], int]:
        """Sample the next segment of all open responses, those to the prompts ``drawn`` included. Collective over all ranks.

        Returns the responses that train in this step, counts, the tokens sampled of each response by replica, and how many tokens moved
        between replicas before. Responses that have ended come first, and are graded. ``show`` takes their number.
        Raises StepAbandoned like ``sample``; ``responses`` then are unchanged.
        """
        table = responses.opened(drawn, seed_step)
        moved = responses.moved_tokens(table)
        if moved:
            with timer.phase("generate"):
                leaving = all_gather_objects(responses.leaving(table) if self.engine.is_replica_leader else {})
            responses.arrive(table, {key: tokens for part in leaving for key, tokens in part.items()})
        while True:
            segments, engine_error, reward_error = self._try_continue(responses, table, sampling, seed_step, timer)
            with timer.phase("reward"):
                failures = self._gather_failures(engine_error, reward_error)
                if not failures:
                    ends = {key: segment.end for key, segment in segments.items()}
                    gathered = all_gather_objects(ends if self.engine.is_replica_leader else {})
                    break
            self._recover_engine(failures, timer)  # then repeat the same requests with the same seeds on every rank
        ends = {key: end for part in gathered for key, end in part.items()}
        remaining, trained, counts = responses.settled(table, ends, seed_step)
        with timer.phase("reward"):
            groups = {number: group for group, number in enumerate(dict.fromkeys(response.prompt_number for response in trained))}
            leads = self.engine.is_replica_leader
            mine = [number for number, response in enumerate(trained) if leads and response.replica == self.engine.replica_index]
            led = [trained[number] for number in mine]
            local, shown, grading_error = self._try_grade(
                mine,
                [groups[response.prompt_number] for response in led],
                [response.prompt for response in led],
                [responses.trajectory(response, segments, seed_step) for response in led],
                show(sum(response.finish_reason is not None for response in trained)),
            )
            self._gather_failures(None, grading_error)
            rows, holder = gather_rows(local)
        responses.commit(remaining, segments, len(drawn))
        return Round(rows, holder, local, shown), counts, responses.sampled_tokens(table, ends), moved

    def _gather_failures(self, engine_error: str | None, reward_error: str | None) -> dict[int, str]:
        """Gather the engine errors of all ranks, by rank. Collective. Raises StepAbandoned on all ranks if any cannot grade."""
        restarts = self.verifiers.take_restarts() if self.verifiers is not None else 0
        gathered = all_gather_objects((engine_error, reward_error, restarts))
        self.grader_restarts += sum(restarts for _, _, restarts in gathered)
        reward_errors = {rank: text for rank, (_, text, _) in enumerate(gathered) if text is not None}
        if reward_errors:
            raise StepAbandoned("; ".join(f"rank {rank}: {text}" for rank, text in reward_errors.items()))
        return {rank: text for rank, (text, _, _) in enumerate(gathered) if text is not None}

    def _try_grade(self, *arguments: Any) -> tuple[RolloutBatch, dict[int, dict[str, Any]], str | None]:
        """Run ``_grade``; return no rows and the error message if the graders fail."""
        try:
            return *self._grade(*arguments), None
        except RewardError as error:
            return no_rows(), {}, str(error)

    def take_recoveries(self) -> tuple[int, int]:
        """Return (rebuilds of the engine, restarts of graders) since the last call, and count from zero again."""
        taken = self.engine_rebuilds, self.grader_restarts
        self.engine_rebuilds = self.grader_restarts = 0
        return taken

    def _recover_engine(self, failures: dict[int, str], timer: PhaseTimer) -> None:
        self._recover(failures, timer)
        self.engine_rebuilds += 1

    def _try_play(
        self, requests: list[GenerationRequest], prompts: list[Prompt], sampling: SamplingConfig, timer: PhaseTimer
    ) -> tuple[list[Trajectory], str | None, str | None]:
        """Run ``_play``. Returns (trajectories, engine error, environment error)."""
        try:
            return (self._play(requests, prompts, sampling, timer) if requests else []), None, None
        except EngineFailure as error:
            return [], str(error), None
        except RewardError as error:
            return [], None, str(error)

    def _try_continue(
        self, responses: OpenResponses, table: Sequence[OpenResponse], sampling: SamplingConfig, seed_step: int, timer: PhaseTimer
    ) -> tuple[dict[Key, Segment], str | None, str | None]:
        """Generate this replica's segments: of one turn or, with an environment, of several. Returns like ``_try_play``."""
        try:
            if self.multi_turn is None:
                requests = responses.requests(table, seed_step)
                with timer.phase("generate"):
                    generations = self.engine.generate(requests, sampling) if requests else []
                return responses.segments(table, generations), None, None
            episodes, prompts = responses.episodes(table, seed_step, self.multi_turn)
            self.multi_turn.advance(episodes, prompts, sampling, *self._callbacks(timer))
            return responses.played(table, episodes), None, None
        except EngineFailure as error:
            return {}, str(error), None
        except RewardError as error:
            return {}, None, str(error)

    def _play(
        self, requests: list[GenerationRequest], prompts: list[Prompt], sampling: SamplingConfig, timer: PhaseTimer
    ) -> list[Trajectory]:
        """Generate this replica's complete responses: one turn each or, with an environment, several."""
        if self.multi_turn is not None:
            return self.multi_turn.play(requests, prompts, sampling, *self._callbacks(timer))
        with timer.phase("generate"):
            return [Trajectory.of_one_turn(generation) for generation in self.engine.generate(requests, sampling)]

    def _callbacks(self, timer: PhaseTimer) -> tuple[Generate, Respond]:
        """Return the functions by which turns are generated and answered. They fail on all ranks of a replica, or on none."""

        def generate(wanted: Sequence[GenerationRequest], how: SamplingConfig) -> list[Generation]:
            found, failure = [], None
            try:
                with timer.phase("generate"):
                    found = self.engine.generate(wanted, how)
            except EngineFailure as error:
                failure = str(error)
            self._raise_together(EngineFailure, failure)  # otherwise the other ranks would wait for this one after the turn
            return found

        def respond(turns: Sequence[TurnRequest]) -> list[Reply]:
            with timer.phase("environment"):
                replies, failure = [], None
                try:
                    replies = self._call_environment(turns)
                except RewardError as error:
                    failure = str(error)
                self._raise_together(RewardError, failure)
                return self._broadcast_replies(replies)

        return generate, respond

    def _call_environment(self, turns: Sequence[TurnRequest]) -> list[Reply]:
        """Return the environment's replies on the replica's leader, an empty list on its other ranks."""
        if not self.engine.is_replica_leader or self.multi_turn is None:
            return []
        assert self.verifiers is not None, "the leader of a replica calls the environment, so it needs the worker processes"
        return self.verifiers.respond(self.multi_turn.settings.name, turns)

    def _raise_together(self, kind: type[VapoError], failure: str | None) -> None:
        """Raise ``kind`` on all ranks of this replica if any of them has a failure."""
        gathered = [failure]
        if self._replica_group is not None:
            gathered = [None] * dist.get_world_size(self._replica_group)
            dist.all_gather_object(gathered, failure, group=self._replica_group)
        failures = [text for text in gathered if text is not None]
        if failures:
            raise kind(failures[0])

    def _broadcast_replies(self, replies: list[Reply]) -> list[Reply]:
        """Broadcast the replies from the replica's leader to all its ranks, which must continue identically."""
        if self._replica_group is None:
            return replies
        box = [replies]
        dist.broadcast_object_list(box, group=self._replica_group, group_src=0)
        return box[0]

    def _grade(
        self,
        numbers: list[int],
        groups: list[int],
        prompts: Sequence[Prompt],
        trajectories: list[Trajectory],
        show: Collection[int],
        choices: ExpertChoices | None = None,
    ) -> tuple[RolloutBatch, dict[int, dict[str, Any]]]:
        """Grade this rank's responses. Returns their rows with tokens, and the sample records of those in ``show``.

        ``numbers``: row number of each response; ``groups``: index of its prompt; ``prompts``: the prompt itself; ``choices``: shape of
        the experts that the trajectories have.
        """
        played = zip(prompts, trajectories, strict=True)
        responses = [Response.decode(prompt, trajectory, self.tokenizer, self.region, self.end_texts) for prompt, trajectory in played]
        verdicts = grade_responses(responses, self.verifiers)
        graded = list(zip(responses, verdicts, strict=True))
        rows = response_rows(groups, responses, verdicts, [step_rewards(*pair, self.tokenizer) for pair in graded])
        local = RolloutBatch.from_responses(
            rows,
            [response.prompt.token_ids for response in responses],
            [trajectory.token_ids for trajectory in trajectories],
            [trajectory.logprobs for trajectory in trajectories],
            row_ids=torch.tensor(numbers, dtype=torch.int64),
            sampled=[trajectory.sampled for trajectory in trajectories],
            experts=[trajectory.experts for trajectory in trajectories if trajectory.experts is not None],
            choices=choices,
        )
        shown = {number: sample_record(*pair, self.tokenizer) for number, pair in zip(numbers, graded, strict=True) if number in show}
        return local, shown


def _no_recovery(failures: dict[int, str], timer: PhaseTimer) -> None:
    raise StepAbandoned("the rollout engine failed: " + "; ".join(f"rank {rank}: {text}" for rank, text in failures.items()))


def ended_responses(sampled: Round) -> Round:
    """Return the round without the responses that were cut, which come last."""
    ended = int((~sampled.rows.cut).sum())
    held = sampled.local.select((sampled.local.row_ids < ended).nonzero().flatten())
    return Round(sampled.rows.select(range(ended)), sampled.holder[:ended], held, sampled.shown)


def no_rows() -> RolloutBatch:
    """Return an empty batch, for a rank that holds no responses."""
    return RolloutBatch.from_responses(Rows.empty(), [], [], [])


def keep_groups(rounds: Sequence[Round], kept: Sequence[tuple[int, int]]) -> Round:
    """Merge the chosen (round, group) pairs into one round; rows are renumbered in that order, groups as 0, 1, 2, ..."""
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
