"""Problems and worked solutions of the tiny model, checked by arithmetic of their own."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import addition_task
import make_tiny_model
from addition_task import CHARACTERS, MAX_TIMES, Problem, draw_distinct, draw_problem, worked_solution
from transformers import AutoTokenizer


def totals(text: str) -> list[int]:
    return [int(digits[::-1]) for digits in re.findall(r":(\d{3});", text)]


def test_a_solution_by_hand() -> None:
    problem = Problem(start=37, addend=58, times=3)
    assert problem.prompt == "_/c+58:730;"
    assert worked_solution(problem) == "a/c+58:590;b/c+58:351;c/c+58:112;\\boxed{211}"
    assert problem.answer == "211"


def test_exact_solutions_add_up() -> None:
    rng = random.Random(0)
    for problem in draw_distinct(500, rng):
        expected = [problem.start + number * problem.addend for number in range(problem.times + 1)]
        assert totals(problem.prompt + worked_solution(problem)) == expected
        assert worked_solution(problem).endswith(f"\\boxed{{{expected[-1]}}}")
        assert problem.answer == str(expected[-1])


def test_slips_are_in_the_sums_alone_and_are_carried_on() -> None:
    rng = random.Random(1)
    slips = sums = 0
    for _ in range(400):
        problem = draw_problem(rng)
        text = worked_solution(problem, slip_probability=0.2, rng=rng)
        assert re.sub(r":\d{3};", ":###;", text).split("\\")[0] == re.sub(r":\d{3};", ":###;", worked_solution(problem)).split("\\")[0]
        written = totals(problem.prompt + text)
        assert text.endswith(f"\\boxed{{{written[-1]}}}")
        for before, after in itertools.pairwise(written):
            sums += 1
            if after != before + problem.addend:
                slips += 1
                assert abs(after - before - problem.addend) in (1, 2, 10) or after in (0, 999)
    assert 0.16 < slips / sums < 0.24


def test_lengths_reach_from_10_to_150_tokens() -> None:
    lengths = [len(worked_solution(Problem(start, 10, times))) + 1 for start in (0, 99) for times in range(MAX_TIMES + 1)]
    assert min(lengths) == 10 and max(lengths) >= 150


def test_heldout_problems_are_not_trained_on() -> None:
    rng = random.Random(2)
    heldout = draw_distinct(100, rng)
    training = draw_distinct(2000, rng, exclude=set(heldout))
    assert len(set(heldout)) == 100 and len(set(training)) == 2000 and not set(heldout) & set(training)


def test_tokenizer_has_one_token_a_character_and_round_trips() -> None:
    text = make_tiny_model.tokenizer()
    rng = random.Random(3)
    assert len(text) == len(CHARACTERS) + 2
    for problem in draw_distinct(50, rng):
        whole = problem.prompt + worked_solution(problem)
        tokens = text.encode(whole)
        assert len(tokens) == len(whole)
        assert text.decode(tokens) == whole
        assert text.pad_token_id not in tokens
    assert addition_task.LETTERS[0] == "_"


def test_transformers_adds_no_token_that_the_model_lacks(tmp_path: Path) -> None:
    """It loads the tokenizer of a Qwen2 folder as Qwen2's, which adds an unknown token where there is none."""
    text = make_tiny_model.tokenizer()
    text.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": len(text)}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert sorted(loaded.get_vocab().values()) == list(range(len(text)))
    assert loaded("_/c+58:730;")["input_ids"] == text("_/c+58:730;")["input_ids"]
