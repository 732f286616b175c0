"""avg@k, pass@k, maj@k and their intervals against hand computation and enumeration; problems apart by id, failed responses left out."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest

from vapo_mcore.evaluation.intervals import estimate, wilson_interval
from vapo_mcore.evaluation.statistics import majority_score, pass_at_k, summarise
from vapo_mcore.experience.evaluator import first_of_each_set

T, F, FAILED = True, False, None


def records(*problems, answers=None):
    """``problems``: (source, verdicts) each, or (source, verdicts, subsets); None is a response without a verdict."""
    made = []
    for number, (source, verdicts, *subsets) in enumerate(problems):
        for sample, verdict in enumerate(verdicts):
            made.append(
                {
                    "prompt_id": f"{source}/{number}",
                    "sample_index": sample,
                    "source": source,
                    "correct": bool(verdict),
                    "error": "no verdict" if verdict is None else None,
                    "ungraded": ("timeout", "crash")[sample % 2] if verdict is None else None,
                    "answer": str(sample) if answers is None else answers[number][sample],
                    "finish_reason": "stop",
                    "prompt_length": 10 + number,
                    "response_length": len(made) + 1,
                    "subsets": subsets[0] if subsets else {},
                }
            )
    made[-1]["finish_reason"] = "length"
    return made


def test_mean_over_problems_of_the_mean_over_graded_samples():
    a, b = summarise(records(("a", [T, F]), ("b", [T, T]), ("a", [T, FAILED]), ("a", [FAILED, FAILED])), 2, seed=0)
    assert (a.name, b.name) == ("a", "b")
    assert a.average.value == pytest.approx((0.5 + 1.0) / 2)  # the third problem has one verdict, the fourth none
    assert (a.average.problems, a.problems, a.responses, a.failed) == (2, 3, 6, 3)
    assert (a.causes, b.causes) == ({"crash": 2, "timeout": 1}, {})
    assert (a.scores["pass@2"].value, a.scores["pass@2"].problems) == (1.0, 1)  # pass@2 of one verdict is not defined
    assert (b.average.value, b.average.interval, b.failed) == (1.0, "wilson", 0)
    assert (b.average.low, b.average.high) == wilson_interval(1, 1)
    assert a.lengths.mean == pytest.approx((1 + 2 + 5 + 6 + 7 + 8) / 6)
    assert (a.lengths.right, a.lengths.wrong, a.lengths.max) == ((1 + 5) / 2, 2.0, 8)
    assert (a.truncated, b.truncated, a.truncated_right, b.truncated_right) == (pytest.approx(1 / 6), 0.0, 0.0, None)
    assert (a.prompt_tokens, a.response_tokens) == (10 + 12 + 13, 1 + 2 + 5 + 6 + 7 + 8)


def test_a_set_without_verdicts_is_undefined_and_not_zero():
    (a,) = summarise(records(("a", [FAILED])), 1, seed=0)
    assert (a.average, a.failed) == (None, 1)
    (b,) = summarise(records(("b", [FAILED, FAILED])), 2, seed=0)
    assert list(b.scores.values()) == [None, None, None]


def test_problems_with_the_same_id_only_are_the_same():
    rows = records(("a", [T, F]), ("a", [F, F]))
    for row in rows:
        row["prompt"] = "the same text"  # must not matter
    assert summarise(rows, 2, seed=0)[0].problems == 2


def test_parts_by_field_and_value():
    rows = records(("a", [T], {"level": "10"}), ("a", [F], {"level": "9"}), ("a", [T], {"level": "9"}), ("a", [F], {"level": "hard"}))
    (a,) = summarise(rows, 1, seed=0)
    assert [(part.name, part.problems, part.average.value) for part in a.parts["level"]] == [
        ("9", 2, 0.5),
        ("10", 1, 1.0),
        ("hard", 1, 0.0),
    ]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for right in range(n + 1):
        samples = [index < right for index in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """The mean over all outcomes of n = 6 samples with p = 0.3 is 1 - (1 - p)^k."""
    p, n = 0.3, 6
    outcome = [float(np.prod([p] * c + [1 - p] * (n - c))) * len(list(combinations(range(n), c))) for c in range(n + 1)]
    for k in range(1, n + 1):
        assert sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(outcome)) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "right", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_pass_at_k_out_of_range(n, right, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, right, k)


def test_sizes_of_pass_at_k():
    (a,) = summarise(records(("a", [T, F, F, F, F, F]), ("a", [F] * 6)), 6, seed=0)
    assert list(a.scores) == ["avg@6", "pass@2", "pass@4", "pass@6", "maj@6"]
    assert [a.scores[f"pass@{k}"].value for k in (2, 4, 6)] == pytest.approx([1 / 6, 1 / 3, 1 / 2])


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ([(T, "1/2"), (T, "0.5"), (F, "2"), (F, "2"), (F, "3")], 0.5),  # right ones are one answer, however spelled; a tie of two
        ([(T, "1"), (F, "2"), (F, "3")], 1 / 3),
        ([(T, "1"), (T, "1"), (F, "2")], 1.0),
        ([(F, "2"), (F, "2"), (T, "1")], 0.0),
        ([(F, None), (F, None), (T, "1")], 1.0),  # no answer, no vote
        ([(T, None), (F, None)], 1.0),
        ([(F, None), (F, None)], 0.0),
        ([(F, "1"), (F, "2")], 0.0),
    ],
)
def test_majority(answers, score):
    assert majority_score(answers) == pytest.approx(score)


def test_majority_is_undefined_where_the_verifier_knows_no_answer():
    rows = records(("a", [T, F]))
    del rows[1]["answer"]
    assert summarise(rows, 2, seed=0)[0].scores["maj@2"] is None


def test_intervals_are_seeded_and_close_to_the_normal_one():
    values = np.random.default_rng(3).random(400)
    one, again, other = estimate(values, 1), estimate(values, 1), estimate(values, 2)
    assert one == again != other
    half = 1.96 * values.std() / 20
    assert (one.low, one.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """400 evaluations of 60 problems, solved by chance in one of four of which a share p_i is right: p_i uniform in [0, 1]."""
    generator = np.random.default_rng(0)
    covered = 0
    for number in range(400):
        found = estimate(generator.binomial(4, generator.random(60)) / 4, number)
        covered += found.low <= 0.5 <= found.high
    assert 0.91 <= covered / 400 <= 0.98


def test_max_prompts_counts_in_each_set():
    @dataclass
    class Item:
        source: str
        number: int

    items = [Item("a", 1), Item("b", 2), Item("a", 3), Item("a", 4), Item("b", 5)]
    assert [item.number for item in first_of_each_set(items, 2)] == [1, 2, 3, 5]
    assert first_of_each_set(items, None) == items
