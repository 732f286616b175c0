"""Hostile and enormous answers, many threads: each costs at most its own verdict."""

import threading
import time

import pytest
import sympy

from tests.unit.rewards.pairs import labelled_pairs
from vapo_mcore.rewards import GradeItem, UngradableError, VerifierPool, reading
from vapo_mcore.rewards.magnitude import has_more_digits_than
from vapo_mcore.rewards.mathematics import is_equal, math

PAIRS = labelled_pairs("answer_pairs.jsonl")


@pytest.mark.parametrize("levels", [14, 25, 200, 10_000])
def test_nested_braces_are_wrong_and_quick(levels):
    start = time.process_time()
    for text in ("{" * levels + "1" + "}" * levels, r"\boxed{" * levels + "1" + "}" * levels, "{x_" * levels + "1" + "}" * levels):
        assert is_equal(text, "5") is False
        assert math(rf"\boxed{{{text}}}", "5", {}) == 0.0
    assert time.process_time() - start < 10


def test_what_the_library_raises_for_a_readable_answer_is_wrong(monkeypatch):
    def raising(*_, **__):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(reading, "verify", raising)
    assert is_equal(r"\{x : x > 2\}", r"(2,\infty)") is False
    assert is_equal("x>3", "(3,4)") is False


HOSTILE = [
    "__import__('os').system('touch PLACE')",
    "open('PLACE', 'w')",
    r"\text{__import__('os').system('touch PLACE')}",
    "(lambda: open('PLACE','w').write('x'))()",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "exec(\"open('PLACE','w')\")",
    r"\input{/etc/passwd}",
    r"\immediate\write18{touch PLACE}",
    r"\def\x{\x\x}\x",
    r"\newcommand{\a}{\a\a}\a",
    r"\directlua{os.execute('touch PLACE')}",
    "sympify('x')",
    "x.__class__",
    r"\sqrt{" * 24 + "2" + "}" * 24,
    r"\binom{99999999}{44444444}",
]


def test_answers_that_are_code_are_text(tmp_path):
    place = tmp_path / "touched"
    for answer in HOSTILE:
        assert is_equal(answer.replace("PLACE", str(place)), "5") is False, answer
    assert not place.exists()


@pytest.mark.slow
def test_answers_that_take_forever_cost_their_own_verdict():
    endless = [r"\sum_{n=1}^{10^{12}} n^{n}", r"\int_0^{10^{9}} x^{x^{x}} dx"]
    items = [GradeItem("math", rf"\boxed{{{answer}}}", "5") for answer in (*endless, "5", *HOSTILE)]
    with VerifierPool(1, 5.0) as pool:
        verdicts = pool.grade(items)
    assert [verdict.correct for verdict in verdicts] == [False, False, True, *[False] * len(HOSTILE)]
    assert [verdict.error for verdict in verdicts[2:]] == [None] * (len(HOSTILE) + 1)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"9^{9^{9^9}}", "9"),
        (r"9^{9^{9}} \bmod 10", "9"),
        (r"10^{10^{10}}", "x^2"),
        (r"2^{-10^{12}}", "0"),
        (r"((10!)!)!", "1"),
        (r"\binom{10^9}{10^8}", "1"),
        ("(" * 300 + "1" + ")" * 300, "1"),
        ("{" * 500 + "1" + "}" * 500, "1"),
        ("1+" * 600 + "1", "601"),
        (r"\frac{1}{" * 200 + "2" + "}" * 200, "1"),
    ],
)
def test_bombs_are_wrong_and_quick(answer, truth):
    assert is_equal(answer, truth) is False


def test_a_huge_truth_is_no_verdict():
    for answer in (r"\boxed{9^{9^{9^9}}}", r"\boxed{1}", ""):
        with pytest.raises(UngradableError, match="more than 100,000 digits"):
            math(answer, r"9^{9^{9^9}}", {})
    assert is_equal(r"2^{2024}", str(2**2024))


def test_number_of_digits_without_evaluation():
    def pow_(base, exponent):
        return sympy.Pow(base, exponent, evaluate=False)

    ten = sympy.Integer(10)
    assert not has_more_digits_than(pow_(ten, sympy.Integer(99_999)), 100_000)
    assert has_more_digits_than(pow_(ten, sympy.Integer(100_001)), 100_000)
    assert has_more_digits_than(1 + pow_(ten, pow_(ten, ten)), 100_000)
    assert has_more_digits_than(pow_(sympy.Symbol("x"), sympy.Integer(10**9)), 100_000)
    assert not has_more_digits_than(pow_(sympy.Symbol("x"), sympy.Integer(2024)), 100_000)
    assert has_more_digits_than(sympy.factorial(10**6, evaluate=False), 100_000)
    assert not has_more_digits_than(sympy.factorial(20_000, evaluate=False), 100_000)


@pytest.mark.slow
def test_labelled_pairs_from_64_threads_have_the_same_verdicts():
    items = [GradeItem("math", rf"\boxed{{{pair['answer']}}}", pair["ground_truth"]) for pair in PAIRS]
    expected = [math(item.response, item.ground_truth, {}) for item in items]
    results: dict[int, list[float]] = {}
    with VerifierPool(2, 60.0, cache_size=0) as pool:

        def grade(number: int) -> None:
            rotated = items[number:] + items[:number]
            scores = [verdict.score for verdict in pool.grade(rotated)]
            results[number] = scores[len(items) - number :] + scores[: len(items) - number]

        threads = [threading.Thread(target=grade, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats.errors == 0
    assert all(results[number] == expected for number in range(64))
