"""From played responses to rows: what is trained on, what is graded, where rewards stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from vapo_mcore.data.prompts import Prompt
from vapo_mcore.data.rollout_batch import RolloutBatch
from vapo_mcore.experience.responses import Response, grade_responses, response_rows, sample_record, step_rewards
from vapo_mcore.rewards import StepReward, Verdict
from vapo_mcore.rollout.base import GenerationRequest, Trajectory, TrajectoryEnd, Turn

PROMPT = Prompt("set/1#0", [90, 91], "q", "truth", "set", "exact", {"of": 1})


class Lossy:
    """Decodes 0 to nothing and every number from 50 on to a question mark: what it wrote cannot be encoded again."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join("?" if token >= 50 else chr(96 + token) for token in token_ids if token > 0)


def trajectory(token_ids: list[int], sampled: list[bool], turns: list[Turn], reason: TrajectoryEnd = "stop", **more: Any) -> Trajectory:
    return Trajectory(
        GenerationRequest("set/1#0", 0, [90, 91], 7), token_ids, [-1.0] * len(token_ids), sampled, reason, tuple(turns), **more
    )


TWO_TURNS = trajectory([1, 2, 0, 60, 61, 3, 55], [True] * 3 + [False] * 2 + [True] * 2, [Turn(0, 3, 0.5), Turn(5, 7)])


def rows_of(response: Response, verdict: Verdict) -> Any:
    return response_rows([0], [response], [verdict], [step_rewards(response, verdict, Lossy())])


def test_trap_11_the_sampled_ids_are_trained_on_whatever_they_decode_to() -> None:
    response = Response.decode(PROMPT, TWO_TURNS, Lossy())
    rows = rows_of(response, Verdict(1.0, True, None, 0.0))
    batch = RolloutBatch.from_responses(rows, [PROMPT.token_ids], [TWO_TURNS.token_ids], [TWO_TURNS.logprobs], sampled=[TWO_TURNS.sampled])
    assert batch["tokens"].tolist() == [90, 91, 1, 2, 0, 60, 61, 3, 55]
    assert batch["response_mask"].tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert batch["rollout_logprobs"].tolist() == [0, 0, -1, -1, -1, 0, 0, -1, -1]
    assert (rows.response_length.tolist(), rows.tool_length.tolist(), rows.length.tolist(), rows.turns.tolist()) == ([5], [2], [9], [2])


def test_the_verifier_reads_the_turns_and_not_the_observations() -> None:
    response = Response.decode(PROMPT, TWO_TURNS, Lossy())
    assert response.text == "ab\nc?"
    record = sample_record(response, Verdict(1.0, True, None, 0.0), Lossy())
    assert (record["turns"], record["observations"], record["turn_rewards"]) == (["ab", "c?"], ["??"], [0.5, 0.0])
    assert record["response_length"] == 5


def test_rewards_of_steps_and_turns_stand_on_the_tokens_that_complete_them() -> None:
    response = Response.decode(PROMPT, TWO_TURNS, Lossy())
    steps = (StepReward(1, 1.0), StepReward(3, 2.0), StepReward(4, 3.0), StepReward(5, 4.0))  # the second ends with the line break
    assert step_rewards(response, Verdict(1.0, True, None, 0.0, steps), Lossy()) == ((2, 1.0), (3, 2.0), (4, 0.5), (7, 3.0), (8, 4.0))


def test_a_response_whose_environment_failed_has_no_verdict_and_is_not_graded() -> None:
    class Pool:
        def grade(self, items: Sequence[Any]) -> list[Verdict]:
            assert [item.response for item in items] == ["ab\nc?"]
            return [Verdict(1.0, True, None, 0.5)]

    failed = trajectory([1], [True], [Turn(0, 1)], error="environment 'x' took longer than 5 s")
    responses = [Response.decode(PROMPT, one, Lossy()) for one in (failed, TWO_TURNS)]
    verdicts = grade_responses(responses, Pool())  # type: ignore[arg-type]
    assert verdicts == [
        Verdict(0.0, False, "environment 'x' took longer than 5 s", 0.0, cause="environment"),
        Verdict(1.0, True, None, 0.5),
    ]
    rows = response_rows([0, 0], responses, verdicts, [(), ()])
    assert rows.graded.tolist() == [False, True] and rows.ungraded == ["environment", ""]
    assert sample_record(responses[0], verdicts[0], Lossy())["ungraded"] == "environment"
    with pytest.raises(ValueError, match="an error with its cause, or neither"):
        Verdict(0.0, False, "no verdict", 0.0)
    with pytest.raises(ValueError, match="row 0 has the cause ''"):
        replace(rows, ungraded=["", ""])


def test_truncated_responses_that_have_an_end_of_turn_text() -> None:
    """Lossy writes 1, 2, 3 as a, b, c: "b" ends a turn."""
    found = []
    for ids, reason in (([1, 2, 3], "length"), ([1, 2, 3], "stop"), ([1, 3], "length")):
        played = trajectory(ids, [True] * len(ids), [Turn(0, len(ids))], reason)
        response = Response.decode(PROMPT, played, Lossy(), end_texts=("b", "</s>"))
        found += rows_of(response, Verdict(1.0, True, None, 0.0)).missed_end.tolist()
    assert found == [True, False, False]


def test_sampled_tokens_must_be_those_of_the_rows() -> None:
    response = Response.decode(PROMPT, TWO_TURNS, Lossy())
    rows = rows_of(response, Verdict(1.0, True, None, 0.0))
    given = ([PROMPT.token_ids], [TWO_TURNS.token_ids], [TWO_TURNS.logprobs])
    with pytest.raises(ValueError, match="pass sampled"):
        RolloutBatch.from_responses(rows, *given)
    with pytest.raises(ValueError, match="do not agree"):
        RolloutBatch.from_responses(rows, *given, sampled=[[True] * 7])


def test_a_verifier_finds_the_sampling_seed_of_its_response() -> None:
    seen: list[dict[str, Any]] = []

    class Pool:
        def grade(self, items: Sequence[Any]) -> list[Verdict]:
            seen.extend(dict(item.metadata) for item in items)
            return [Verdict(1.0, True, None, 0.0) for _ in items]

    prompt = replace(PROMPT, metadata={"level": 3})
    played = [replace(TWO_TURNS, request=replace(TWO_TURNS.request, seed=seed)) for seed in (11, 2**63 - 1)]
    grade_responses([Response.decode(prompt, one, Lossy()) for one in played], Pool())  # type: ignore[arg-type]
    assert seen == [{"level": 3, "sample_seed": seed, "answer_region_start": 0} for seed in (11, 2**63 - 1)]
    assert prompt.metadata == {"level": 3}
