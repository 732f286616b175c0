"""Which part of a response is its answer."""

import time

import pytest

from vapo_mcore.rewards.extraction import (
    choice_text,
    last_number,
    marked_answer,
    marked_answer_or_all,
    marked_answer_or_last_line,
    marked_answer_or_last_number,
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"so $\boxed{ 42 }$.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x : x > 0\right.}", r"\left\{x : x > 0\right."),  # an escaped brace without its partner
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        ("<answer>42</answer>", "42"),
        ("<answer>\n 42 \n</answer>", "42"),
        ("<ANSWER>42</ANSWER>", "42"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
        (r"<answer>The sum is \boxed{5}</answer>", "5"),
        (r"\boxed{3} <answer>4</answer>", "4"),
        (r"<answer>4</answer> \boxed{3}", "3"),
        (r"\boxed{}", ""),
        ("<answer></answer>", ""),
        (r"\boxed{42", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{41} I mean \boxed{42", None),  # cut inside the final answer: the earlier one was given up
        ("<answer>42", None),
        ("42", None),
        (r"\boxed 42", None),
        ("", None),
    ],
)
def test_marked_answer(response, answer):
    assert marked_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the sum is 42.", "42"),
        ("3 + 4 = 7", "7"),
        ("between -3 and -7.5", "-7.5"),
        ("about 1,234,567 people", "1,234,567"),
        ("1,2", "2"),
        ("a ratio of 3/4", "3/4"),
        (r"is \frac{3}{4}.", r"\frac{3}{4}"),
        (r"is -\dfrac{3}{4}", r"-\dfrac{3}{4}"),
        ("it costs $5.50", "$5.50"),
        ("rises by 12.5%", "12.5%"),
        ("x2 and H2O", None),
        ("no number", None),
        ("is .5", ".5"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_fallbacks_only_where_nothing_is_marked():
    assert marked_answer_or_all("  yes \n") == "yes"
    assert marked_answer_or_all(r"well \boxed{yes}") == "yes"
    assert marked_answer_or_all(r"well \boxed{yes") == ""
    assert marked_answer_or_last_number("2 + 2 = 4") == "4"
    assert marked_answer_or_last_number(r"2 + 2 = 4, \boxed{5}") == "5"
    assert marked_answer_or_last_number(r"2 + 2 = 4, \boxed{5") is None
    assert marked_answer_or_last_line("first\nlast line  \n\n") == "last line"
    assert marked_answer_or_last_line("first\n<answer>x</answer>\nlast") == "x"
    assert marked_answer_or_last_line("") == ""


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (r"\boxed{B}", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B), since ...", "(B)"),
        ("Answer: **C**", "C"),
        ("the correct option is D", "D"),
        ("The answer is A? No, the answer is C.", "C"),
        ("B", "B"),
        ("(B)", "(B)"),
        ("The answer is Apples", None),
        ("I like B and C", None),
    ],
)
def test_choice_text(response, text):
    assert choice_text(response) == text


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 40_000,
        r"\boxed{" + "{" * 300_000,
        "<answer>" * 40_000,
        "9" * 300_000,
        "1,234," * 50_000,
        "-" * 300_000,
        " " * 300_000,
        "answer is " * 30_000,
        r"\frac{" * 50_000,
        r"\\boxed" + " " * 300_000,
        "." * 300_000,
    ],
)
def test_long_responses_take_linear_time(response):
    start = time.process_time()
    for function in (marked_answer, marked_answer_or_last_number, marked_answer_or_last_line, choice_text):
        function(response)
    assert time.process_time() - start < 3.0
