"""``exact``, ``regex``, ``multiple_choice`` and ``reasoning_gym``."""

import json

import pytest
import reasoning_gym as gym

from vapo_mcore.rewards import GradeItem, UngradableError
from vapo_mcore.rewards.procedural import procedural_answer, reasoning_gym
from vapo_mcore.rewards.registry import answer_key
from vapo_mcore.rewards.text import exact, multiple_choice, regex


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("yes", " yes\n", 1.0),
        (r"I think \boxed{yes}", "yes", 1.0),
        ("<answer>a b</answer>", "a b", 1.0),
        ("Yes", "yes", 0.0),
        ("a  b", "a b", 0.0),
        (r"yes \boxed{", "yes", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact(response, truth, score):
    assert exact(response, truth, {}) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("<answer>colour</answer>", "colou?r", 1.0),
        ("<answer>colours</answer>", "colou?r", 0.0),
        ("a\nb", r"a\sb", 1.0),
        ("42", r"\d+", 1.0),
    ],
)
def test_regex(response, truth, score):
    assert regex(response, truth, {}) == score


def test_a_truth_that_is_no_regular_expression_is_no_verdict():
    with pytest.raises(UngradableError, match="not a regular expression"):
        regex("x", "(", {})


CHOICES = {"choices": ["Paris", "London", "Rome.", "None of these"]}


@pytest.mark.parametrize(
    ("response", "truth", "metadata", "score"),
    [
        (r"\boxed{B}", "B", {}, 1.0),
        (r"\boxed{(b)}", "B", {}, 1.0),
        (r"\boxed{\text{B}}", "(B)", {}, 1.0),
        (r"\boxed{\textbf{(B)}\ 12}", "B", {}, 1.0),
        (r"\boxed{B. 12}", "B", {}, 1.0),
        (r"\boxed{C}", "B", {}, 0.0),
        (r"\boxed{BC}", "B", {}, 0.0),
        ("The answer is (B).", "B", {}, 1.0),
        ("The answer is B or C. The answer is C", "B", {}, 0.0),
        ("B", "B", {}, 1.0),
        ("Banana", "B", {}, 0.0),
        ("no idea", "B", {}, 0.0),
        (r"\boxed{London}", "B", CHOICES, 1.0),
        (r"\boxed{ london. }", "B", CHOICES, 1.0),
        (r"\boxed{B. London}", "B", CHOICES, 1.0),
        (r"\boxed{B. Paris}", "B", CHOICES, 0.0),
        (r"\boxed{A. London}", "B", CHOICES, 0.0),
        (r"\boxed{B}", "London", CHOICES, 1.0),
        (r"\boxed{Rome}", "C", CHOICES, 1.0),
        (r"\boxed{E}", "B", CHOICES, 0.0),
        (r"\boxed{B}", "B", {"choices": {"label": ["A", "B"], "text": ["x", "y"]}}, 1.0),
        (r"\boxed{y}", "B", {"choices": {"label": ["A", "B"], "text": ["x", "y"]}}, 1.0),
        (r"\boxed{y}", "b", {"choices": {"a": "x", "b": "y"}}, 1.0),
    ],
)
def test_multiple_choice(response, truth, metadata, score):
    assert multiple_choice(response, truth, metadata) == score


@pytest.mark.parametrize(("truth", "metadata"), [("London", {}), ("", {}), ("Berlin", CHOICES), ("E", CHOICES)])
def test_a_truth_that_is_no_choice_is_no_verdict(truth, metadata):
    with pytest.raises(UngradableError, match="neither a letter nor one of the choices"):
        multiple_choice(r"\boxed{B}", truth, metadata)


@pytest.mark.parametrize(
    ("response", "truth", "answer"),
    [
        ("<answer> 17 </answer>", "17", "17"),
        (r"so \boxed{17}", "17", "17"),
        ("9 + 8\nThe sum is 17.", "17", "17"),
        ("9 + 8 = 17", "17", "17"),
        ("-17", "-17", "-17"),
        ("1,017", "1017", "1017"),
        ("<answer>the sum is 17</answer>", "17", "the sum is 17"),
        ("first\nno number here", "17", "no number here"),
        ("first\nthe red one", "the red one", "the red one"),
        ("17\n<answer>18", "17", ""),
    ],
)
def test_what_is_given_to_the_scorer(response, truth, answer):
    assert procedural_answer(response, truth) == answer


@pytest.mark.parametrize(
    "task", ["chain_sum", "basic_arithmetic", "simple_equations", "number_sorting", "countdown", "sudoku", "knights_knaves"]
)
def test_reasoning_gym_is_judged_by_its_own_scorer(task):
    entries = list(gym.create_dataset(task, size=3, seed=5))
    for entry in entries:
        metadata = json.loads(json.dumps(entry["metadata"])) if task != "number_sorting" else entry["metadata"]
        right = entry["answer"] or str(entry["metadata"].get("solution"))
        scorer = gym.get_score_answer_fn(task)
        for answer in (right, "1", "nonsense"):
            given = {"source_dataset": task, **metadata}
            score = reasoning_gym(f"Let me see. <answer>{answer}</answer>", entry["answer"], given)
            assert score == scorer(answer, {**entry, "metadata": given})
        if entry["answer"]:
            assert reasoning_gym(f"<answer>{right}</answer>", entry["answer"], given) == 1.0
            assert reasoning_gym("<answer>nonsense</answer>", entry["answer"], given) < 1.0


def test_reasoning_gym_metadata_may_be_nested_with_task_and_options():
    entry = gym.create_dataset("chain_sum", size=1, seed=1, min_terms=2, max_terms=3)[0]
    metadata = {"task": "chain_sum", "options": {"min_terms": 2, "max_terms": 3}, "entry_metadata": entry["metadata"]}
    assert reasoning_gym(entry["answer"], entry["answer"], metadata) == 1.0
    assert reasoning_gym(entry["answer"] + "1", entry["answer"], metadata) < 1.0


def test_reasoning_gym_verdicts_are_reused_between_responses_of_different_seeds():
    entry = gym.create_dataset("chain_sum", size=1, seed=1)[0]
    items = [GradeItem("reasoning_gym", "17", "17", {"source_dataset": "chain_sum", **entry["metadata"], "sample_seed": n}) for n in (1, 2)]
    assert answer_key(items[0]) == answer_key(items[1])
    assert reasoning_gym(entry["answer"], entry["answer"], items[0].metadata) == 1.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "name no reasoning-gym task"),
        ({"source_dataset": 3}, "name no reasoning-gym task"),
        ({"task": "no_such_task"}, "'no_such_task'"),
        ({"task": "chain_sum", "options": {"no_such": [1]}}, "no_such"),
    ],
)
def test_reasoning_gym_without_a_task_is_no_verdict(metadata, message):
    with pytest.raises(UngradableError, match=message):
        reasoning_gym("1", "1", metadata)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("math", r"a \boxed{1}", "1", {}), ("math", r"b <answer>1</answer>", "1", {"id": 3}), True),
        (("math", r"\boxed{1}", "1", {}), ("math", r"\boxed{1}", "2", {}), False),
        (("math", r"\boxed{1}", "1", {}), ("math_last_number", r"\boxed{1}", "1", {}), False),
        (("math", "1", "1", {}), ("math", "2", "1", {}), True),  # neither has an answer
        (("math_last_number", "1", "1", {}), ("math_last_number", "2", "1", {}), False),
        (("exact", "a", "a", {}), ("exact", " a ", "a", {}), True),
        (
            ("multiple_choice", r"\boxed{x}", "A", {"choices": ["x", "y"]}),
            ("multiple_choice", r"\boxed{x}", "A", {"choices": ["y", "x"]}),
            False,
        ),
        (("reasoning_gym", "is 3", "3", {"task": "a"}), ("reasoning_gym", "<answer>is 3</answer>", "3", {"task": "a"}), False),
        (("reasoning_gym", "3", "3", {"task": "a"}), ("reasoning_gym", "3", "3", {"task": "a", "x": [1]}), False),
        (("pkg.mod:f", "3", "3", {}), ("pkg.mod:f", "3", "3", {}), False),
    ],
)
def test_equal_keys_only_where_the_verdict_must_be_equal(one, other, same):
    assert (answer_key(GradeItem(*one)) == answer_key(GradeItem(*other))) is same
