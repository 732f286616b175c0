"""Step rewards: arithmetic that is worked out, the math_steps verifier, and step scores on their way through the pool."""

from fractions import Fraction

import pytest

from vapo_mcore.environments.arithmetic import ArithmeticFault, evaluate, written
from vapo_mcore.rewards import GradeItem, StepReward, StepScores, VerifierPool
from vapo_mcore.rewards.steps import math_steps


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 + 30", 42),
        ("2*(3+4)-1.5", Fraction(25, 2)),
        ("-3 - -4", 1),
        ("7/2/7", Fraction(1, 2)),
        ("2\u00d73\u00f74", Fraction(3, 2)),
        ("2 - 3 - 4", -5),
        ("0.1+0.2", Fraction(3, 10)),
    ],
)
def test_arithmetic(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["", "1+", "(1", "1)", "2**9", "1/0", "9^9", "__import__", "1 2", "9" * 41, "(" * 60, "1+" * 150 + "1"])
def test_what_is_not_arithmetic_is_refused(text):
    with pytest.raises(ArithmeticFault):
        evaluate(text)


def test_numbers_are_written_exactly():
    given = {"42": "42", "-1/2": "-0.5", "1/3": "1/3", "1/8 + 1": "1.125", "0-0.25": "-0.25"}
    assert {text: written(evaluate(text)) for text in given} == given


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        ("12 + 30 = 42", 1.0),
        ("x = 3+4 = 7", 1.0),
        ("2*(3+4) = 14 = 7*2 and 5 + 5 = 11.", 0.0),
        ("so $3+4=7$", 1.0),
        ("1/3 = 0.33", 0.0),
        ("then 5 + 5 = 10.", 1.0),
    ],
)
def test_a_line_with_equations_is_a_step(line, reward):
    assert math_steps(line, "1", {}).steps == [StepReward(len(line), reward)]


@pytest.mark.parametrize(
    "line", ["3a + 4 = 7", "y^2 + 3 = 5", "a2 + 3 = 5", "100 = 100", "x = 5", "", "." * 1999 + "=", "1" * 3000 + "+1=2"]
)
def test_a_line_that_cannot_be_worked_out_is_none(line):
    assert math_steps(line, "1", {}).steps == []


def test_steps_end_with_their_lines_and_the_answer_is_judged_apart():
    response = "First 2 + 2 = 5\nwords\n5 * 2 = 10\n\\boxed{8}"
    found = math_steps(response, "8", {})
    assert found.score == 1.0
    assert [(response[: step.end].splitlines()[-1], step.reward) for step in found.steps] == [("First 2 + 2 = 5", 0.0), ("5 * 2 = 10", 1.0)]


def test_the_pool_hands_over_steps_and_refuses_wrong_ones():
    texts = ["1 + 1 = 2\n\\boxed{2}", "1 + 1 = 3\n\\boxed{2}", "1 + 1 = 2\n\\boxed{2}"]
    kinds = ["steps", "steps_unordered", "steps_outside", "steps_nan", "steps_wrong_type"]
    with VerifierPool(workers=1, timeout_seconds=20.0) as pool:
        verdicts = pool.grade([GradeItem("math_steps", text, "2") for text in texts])
        again = pool.grade([GradeItem("math_steps", texts[0], "2")])
        odd = pool.grade([GradeItem(f"tests.unit.rewards.misbehaving:{kind}", "abcdef", "") for kind in kinds])
    assert [verdict.steps for verdict in verdicts] == [(StepReward(10, 1.0),), (StepReward(10, 0.0),), (StepReward(10, 1.0),)]
    assert all(verdict.correct for verdict in verdicts)
    assert again[0].steps == verdicts[0].steps  # remembered with its steps
    assert (odd[0].score, odd[0].steps) == (0.5, (StepReward(2, -0.25), StepReward(6, 1.0)))
    assert all(verdict.error is not None and verdict.steps == () for verdict in odd[1:])
    assert "ends must rise" in str(odd[1].error) and "character 7 of 6" in str(odd[2].error)
    assert "finite" in str(odd[3].error) and "StepReward" in str(odd[4].error)


def test_a_plain_number_is_a_score_without_steps():
    assert StepScores(1.0).fault("anything") is None
