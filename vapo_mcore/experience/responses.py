"""Grade complete responses and convert them to rows: place step rewards on tokens and build the records of the samples file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from vapo_mcore.data.prompts import Prompt
from vapo_mcore.data.rollout_batch import Rows, StepRewards
from vapo_mcore.data.text_positions import completing_tokens
from vapo_mcore.environments.types import ANSWER_START, with_sample_seed
from vapo_mcore.rewards.pool import GradeItem, Verdict, VerifierPool
from vapo_mcore.rewards.region import AnswerRegion
from vapo_mcore.rollout.base import Trajectory, Turn

ANYWHERE = AnswerRegion()


@dataclass(frozen=True)
class Response:
    """A complete response to a prompt, with the text of each turn.

    The verifier reads ``text``; its answer counts only after the first ``answer_start`` characters.
    """

    prompt: Prompt
    trajectory: Trajectory
    turns: list[str]
    answer_start: int = 0
    missed_end: bool = False

    @property
    def text(self) -> str:
        """Return the text that the model wrote. Observations of the environment are excluded: they could contain the answer."""
        return "\n".join(self.turns)

    @property
    def metadata(self) -> dict[str, Any]:
        """Further input of the verifier: the other columns of the prompt's row, the response's sampling seed and its answer region."""
        return with_sample_seed(self.prompt.metadata, self.trajectory.request.seed) | {ANSWER_START: self.answer_start}

    @classmethod
    def decode(
        cls, prompt: Prompt, trajectory: Trajectory, tokenizer: Any, region: AnswerRegion = ANYWHERE, end_texts: Sequence[str] = ()
    ) -> Response:
        """Decode a trajectory. ``end_texts``: texts that end a turn, searched for in truncated responses."""
        if trajectory.finish_reason == "cut":  # its text is not read
            return cls(prompt, trajectory, [""] * len(trajectory.turns))
        ids, turns = trajectory.token_ids, trajectory.turns
        texts = [tokenizer.decode(ids[turn.start : turn.end], skip_special_tokens=True) for turn in turns]
        start = 0
        if region.tags is not None:
            between = [tokenizer.decode(ids[one.end : other.start]) for one, other in pairwise(turns)]
            start = region.start(texts, [prompt.text, *between])
        missed = False
        if trajectory.finish_reason == "length" and end_texts:
            last = tokenizer.decode(ids[turns[-1].start : turns[-1].end])
            missed = any(text in last for text in end_texts)
        return cls(prompt, trajectory, texts, start, missed)


def grade_responses(responses: Sequence[Response], verifiers: VerifierPool | None) -> list[Verdict]:
    """Grade the responses and return verdicts in order.

    A response whose environment failed gets an error and is not graded; one that was cut is not graded either, and gets a score of 0.
    """
    known = [_known_verdict(response) for response in responses]
    read = [response for response, verdict in zip(responses, known, strict=True) if verdict is None]
    items = [GradeItem(r.prompt.verifier, r.text, r.prompt.ground_truth, r.metadata) for r in read]
    graded: list[Verdict] = []
    if items:
        assert verifiers is not None, "the leader of a replica grades, so it needs verifiers"
        graded = verifiers.grade(items)
    verdicts = iter(graded)
    return [next(verdicts) if verdict is None else verdict for verdict in known]


def _known_verdict(response: Response) -> Verdict | None:
    """Return the verdict of a response that no verifier reads."""
    error = response.trajectory.error
    if error is not None:
        return Verdict(0.0, False, error, 0.0, cause="environment")
    return Verdict(0.0, False, None, 0.0) if response.trajectory.finish_reason == "cut" else None


def step_rewards(response: Response, verdict: Verdict, tokenizer: Any) -> StepRewards:
    """Return (position in the sequence, reward) of each step, at the token that completes it, and of each turn, at its last token."""
    start, trajectory = len(response.prompt.token_ids), response.trajectory
    placed = [(start + turn.end - 1, turn.reward) for turn in trajectory.turns if turn.reward != 0.0]
    begin = 0
    steps = list(verdict.steps)
    for turn, text in zip(trajectory.turns, response.turns, strict=True):
        stop = begin + len(text) + 1  # includes the line break after the turn
        mine = [step for step in steps if begin < step.end <= stop]
        placed += _place_in_turn(trajectory, turn, start, [(min(step.end - begin, len(text)), step.reward) for step in mine], tokenizer)
        begin = stop
    return tuple(sorted(placed, key=lambda step: step[0]))


def _place_in_turn(
    trajectory: Trajectory, turn: Turn, start: int, steps: list[tuple[int, float]], tokenizer: Any
) -> list[tuple[int, float]]:
    tokens = completing_tokens(tokenizer, trajectory.token_ids[turn.start : turn.end], [end for end, _ in steps])
    return [(start + turn.start + token, reward) for token, (_, reward) in zip(tokens, steps, strict=True)]


def response_rows(groups: Sequence[int], responses: Sequence[Response], verdicts: Sequence[Verdict], steps: list[StepRewards]) -> Rows:
    """Build one row per response. ``groups``: index of each response's prompt."""
    trajectories = [response.trajectory for response in responses]
    sampled = [sum(trajectory.sampled) for trajectory in trajectories]
    integers = {
        "group": groups,
        "sample_index": [trajectory.request.sample_index for trajectory in trajectories],
        "prompt_length": [len(response.prompt.token_ids) for response in responses],
        "response_length": sampled,
        "tool_length": [len(trajectory.token_ids) - own for trajectory, own in zip(trajectories, sampled, strict=True)],
        "turns": [len(trajectory.turns) for trajectory in trajectories],
        "observations_cut": [trajectory.observations_cut for trajectory in trajectories],
    }
    scores = torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float32)
    return Rows(
        prompt_id=[response.prompt.prompt_id for response in responses],
        verdict=torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool),
        graded=torch.tensor([verdict.error is None for verdict in verdicts], dtype=torch.bool),
        ungraded=[verdict.cause or "" for verdict in verdicts],
        score=scores,
        reward=scores.clone(),
        finish_reason=[trajectory.finish_reason for trajectory in trajectories],
        source=[response.prompt.source for response in responses],
        step_rewards=steps,
        segments=[trajectory.segments for trajectory in trajectories],
        observations=[trajectory.observations for trajectory in trajectories],
        missed_end=torch.tensor([response.missed_end for response in responses], dtype=torch.bool),
        **{name: torch.tensor(list(column), dtype=torch.int64) for name, column in integers.items()},
    )


def sample_record(response: Response, verdict: Verdict, tokenizer: Any) -> dict[str, Any]:
    """Build one line of the samples file."""
    prompt, trajectory = response.prompt, response.trajectory
    record: dict[str, Any] = {
        "prompt_id": prompt.prompt_id,
        "sample_index": trajectory.request.sample_index,
        "source": prompt.source,
        "prompt": prompt.text,
        "response": response.text,
        "ground_truth": prompt.ground_truth,
        "correct": verdict.correct,
        "score": verdict.score,
        "step_rewards": [[step.end, step.reward] for step in verdict.steps],
        "error": verdict.error,
        "ungraded": verdict.cause,
        "answer_start": response.answer_start,
        "finish_reason": trajectory.finish_reason,
        "response_length": sum(trajectory.sampled),
    }
    if len(trajectory.segments) > 1 or any(age for _, age in trajectory.segments):
        record["segments"] = [list(segment) for segment in trajectory.segments]
    if len(trajectory.turns) > 1 or any(turn.reward for turn in trajectory.turns):
        between = zip(trajectory.turns, trajectory.turns[1:], strict=False)
        record["turns"] = response.turns
        record["turn_rewards"] = [turn.reward for turn in trajectory.turns]
        record["observations"] = [tokenizer.decode(trajectory.token_ids[one.end : other.start]) for one, other in between]
    return record
