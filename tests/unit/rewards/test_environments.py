"""Environments in the worker processes: answers in order, and what a bad one costs; the calculator."""

from __future__ import annotations

import pytest

from vapo_mcore.environments import Observation, Reply, TurnRequest
from vapo_mcore.environments.calculator import calculator
from vapo_mcore.errors import RewardError
from vapo_mcore.rewards import GradeItem, VerifierPool
from vapo_mcore.rewards.registry import load_environment

BAD = "tests.unit.rewards.misbehaving:answers"


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("I need <calc>2*(3+4)</calc>", "14"),
        ("first <calc>1</calc>, then <calc> 1/8 </calc> \n", "0.125"),
        ("<calc>1/3</calc>", "1/3"),
        ("<calc>1/0</calc>", "error: division by zero"),
        ("<calc>__import__('os')</calc>", "error: \"__import__('os')\" is not arithmetic"),
        ("<calc>9**9</calc>", "error: '*' was not expected"),
        ("<calc></calc>", "error: the expression is incomplete"),
    ],
)
def test_the_calculator_answers_the_call_that_ends_a_turn(turn: str, answer: str) -> None:
    assert calculator(["<calc>9</calc>", turn], "", {}) == Observation(answer)


@pytest.mark.parametrize("turn", ["", "the answer is 14", "<calc>1+1</calc> is 2", "<calc>1+1", "<calc>1</calc><calc>2"])
def test_a_turn_that_does_not_end_with_a_call_ends_the_response(turn: str) -> None:
    assert calculator([turn], "", {}) is None


def test_replies_come_in_order_and_a_bad_answer_costs_its_own_response() -> None:
    said = ["fine", "hang", "exit", "raise", "number", "nan", "over", "fine again"]
    with VerifierPool(workers=2, timeout_seconds=2.0) as pool:
        pool.load(["exact"], ["calculator", BAD])
        replies = pool.respond(BAD, [TurnRequest(("before", text), "truth", {"of": 3}) for text in said])
        assert pool.respond("calculator", [TurnRequest(("<calc>1+1</calc>",), "")]) == [Reply(Observation("2"))]
        assert pool.grade([GradeItem("exact", "a", "a")])[0].correct
        assert pool.respond(BAD, []) == []
    texts = [reply.observation.text for reply in replies]
    assert texts == ["2 turns, truth, 3: fine", None, None, None, None, None, None, "2 turns, truth, 3: fine again"]
    errors = [reply.error for reply in replies]
    assert errors[0] is errors[6] is errors[7] is None
    assert replies[6].observation == Observation(None, 0.5)
    for error, message in zip(
        errors[1:6],
        ["took longer than 2 s", "ended its process", "failed: ValueError: no", "must be an Observation or None", "finite"],
        strict=True,
    ):
        assert error is not None and error.startswith(f"environment {BAD!r}") and message in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such:thing", "environment 'no_such:thing' cannot be loaded"),
        (
            "tests.unit.rewards.misbehaving:game",
            "belongs to an object of class Game, which may keep state: .* name a function that",
        ),
        ("tests.unit.rewards.misbehaving:answer_of_game", "belongs to an object of class Game, which may keep state"),
        ("tests.unit.rewards.misbehaving:Game", "belongs to an object of class type, which may keep state"),
    ],
)
def test_an_environment_that_cannot_be_used_is_told_at_the_start(name: str, message: str) -> None:
    with VerifierPool(workers=1, timeout_seconds=1.0) as pool, pytest.raises(RewardError, match=message):
        pool.load([], [name])


def test_a_function_with_bound_arguments_is_an_environment() -> None:
    assert load_environment("tests.unit.rewards.misbehaving:patient").answer(("a",), "truth", {"of": 1}).text == "1 turns, truth, 1: a"
