"""Where the answer counts: nothing inside thinking is an answer, however its tags are nested, repeated or left open."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.config_helpers import faults_of, load, write_base
from vapo_mcore.environments import ANSWER_START, RIGHT_ANSWERS
from vapo_mcore.errors import ConfigError
from vapo_mcore.rewards import GradeItem, VerifierPool, stated_answer
from vapo_mcore.rewards.region import AnswerRegion
from vapo_mcore.rewards.registry import answer_key, load_verifier

REGION = AnswerRegion(("<think>", "</think>"))
NESTED_CUT = r"<think>a <think>b</think> \boxed{5}"


def region_of(response: str, before: str = "<|assistant|>", region: AnswerRegion = REGION) -> str:
    return response[region.start([response], [before]) :]


@pytest.mark.parametrize(
    ("response", "before", "found"),
    [
        ("five", "", "five"),
        ("<think>a</think>b", "", "b"),
        ("x<think>a</think>b", "", "b"),
        ("<think>a", "", ""),
        ("b<think>a", "", ""),
        ("<think>", "", ""),
        ("", "", ""),
        ("<think>a<think>b</think>c</think>d", "", "d"),
        ("<think>a<think>b</think>c", "", ""),
        ("<think>a</think>b<think>c</think>d", "", "d"),
        ("<think>a</think>b<think>c", "", ""),
        ("<think>a</think>b</think>c", "", "c"),
        ("a</think>b", "", "b"),
        ("a</think>b", "assistant<think>\n", "b"),
        ("a", "assistant<think>\n", ""),
        ("a", "<think>\n\n</think>\n\n", "a"),  # thinking switched off by the template
        ("<think>a</think>b", "assistant<think>\n", ""),  # nested: opened by the prompt and by the response, closed once
        ("a", "the user wrote <think> in a question", "a"),
        ("<THINK>a", "", "<THINK>a"),
        ("<think>" * 50_000 + "</think>" * 50_000 + "d", "", "d"),
    ],
)
def test_region(response: str, before: str, found: str) -> None:
    assert region_of(response, before) == found
    assert AnswerRegion().start([response], [before]) == 0


def test_turns_begin_outside_thinking() -> None:
    """A turn that ends inside thinking (for a tool, say) does not take the next one along."""
    texts = ["<think>a", "b", "<think>c</think>d"]
    for turns, found in ((1, ""), (2, "b"), (3, "d")):
        start = REGION.start(texts[:turns], ["", "", ""][:turns])
        assert "\n".join(texts[:turns])[start:] == found
    assert REGION.start(["<think>a</think>b", "c"], ["", "observation <think>"]) == len("<think>a</think>b\nc")


def item(response: str, verifier: str = "math", **metadata: Any) -> GradeItem:
    return GradeItem(verifier, response, "5", {ANSWER_START: REGION.start([response], [""]), **metadata})


CASES = [
    (r"<think>\boxed{5}", 0.0),
    (r"<think>\boxed{5}</think> I say \boxed{4}", 0.0),
    (r"<think>\boxed{4}</think> I say \boxed{5}", 1.0),
    (r"<think>\boxed{5}</think> I say nothing.", 0.0),
    (NESTED_CUT, 0.0),
    (r"<think>a <think>\boxed{4}</think> b</think> \boxed{5}", 1.0),
    (r"<think>a</think> \boxed{4} <think>b</think> \boxed{5}", 1.0),
    (r"\boxed{5}", 1.0),
]


def test_verdicts_from_the_pool_and_what_it_remembers() -> None:
    items = [item(response) for response, _ in CASES] + [item(r"<think>\boxed{5}</think> Answer: 4", "math_answer_line")]
    with VerifierPool(1, 60.0) as pool:
        assert [verdict.score for verdict in pool.grade(items)] == [score for _, score in CASES] + [0.0]
        whole = [GradeItem("math", response, "5") for response, _ in CASES]  # anywhere
        assert pool.grade(whole)[0].score == 1.0


def test_answers_are_recognised_by_what_counts() -> None:
    assert answer_key(item(r"<think>\boxed{5}")) != answer_key(item(r"\boxed{5}"))
    assert answer_key(item(r"<think>\boxed{4}</think>\boxed{5}")) == answer_key(item(r"\boxed{5}"))
    assert stated_answer(item(r"<think>\boxed{5}")) is None
    assert stated_answer(item(r"<think>\boxed{5}</think>\boxed{4}")) == "4"


def test_steps_inside_thinking_keep_their_rewards() -> None:
    given = item("<think>2 + 2 = 4\n1 + 1 = 3\n\\boxed{5}", "math_steps")
    found: Any = load_verifier("math_steps").score(given.response, given.ground_truth, given.metadata)
    assert (found.score, [step.reward for step in found.steps]) == (0.0, [1.0, 0.0])


def test_any_of_several_right_answers() -> None:
    """Each of them is tried; an unreadable one is no verdict whatever the response is; answers are remembered with their list."""

    def asked(response: str, *right: str, verifier: str = "math") -> GradeItem:
        return GradeItem(verifier, response, json.dumps(right), {RIGHT_ANSWERS: list(right)})

    items = [asked(rf"\boxed{{{answer}}}", "5", r"\frac{1}{2}") for answer in ("5", "0.5", "6")]
    items += [
        asked(r"\boxed{5}", "5", "?"),
        asked("b", "a", "b", verifier="exact"),
        asked("1 + 1 = 2\n\\boxed{7}", "6", "7", verifier="math_steps"),
    ]
    items += [GradeItem("math", r"\boxed{6, 5}", "5, 6"), GradeItem("math", r"\boxed{5}", "5, 6"), GradeItem("math", r"\boxed{73}", "073")]
    with VerifierPool(1, 60.0) as pool:
        verdicts = pool.grade(items)
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert [number for number, verdict in enumerate(verdicts) if verdict.cause is not None] == [3] and verdicts[3].cause == "ground_truth"
    assert len(verdicts[5].steps) == 1
    assert answer_key(asked("b", "a", "b", verifier="exact")) != answer_key(GradeItem("exact", "b", json.dumps(("a", "b"))))


def tokenizer(template: str | None, special: tuple[str, ...] = ()) -> Any:
    class Token(str):
        special = True

    return SimpleNamespace(chat_template=template, added_tokens_decoder={number: Token(text) for number, text in enumerate(special)})


def test_the_template_decides_unless_the_configuration_does(tmp_path: Path) -> None:
    write_base(tmp_path)
    template = "{{ messages }}<think></think>"
    default = load(tmp_path)
    assert AnswerRegion.of(default, tokenizer(template)) == REGION
    assert AnswerRegion.of(default, tokenizer("{{ messages }}")) == AnswerRegion()
    assert AnswerRegion.of(default, tokenizer("{{ messages }}<think>")) == AnswerRegion()
    assert AnswerRegion.of(load(tmp_path, "data.chat_template=false"), tokenizer(template)) == AnswerRegion()
    assert AnswerRegion.of(load(tmp_path, "reward.answer_region=anywhere"), tokenizer(template)) == AnswerRegion()
    assert AnswerRegion.of(load(tmp_path, "reward.answer_region=after_thinking"), tokenizer(None)) == REGION
    other = load(tmp_path, "reward.thinking_tags=['[THINK]', '[/THINK]']")
    assert AnswerRegion.of(other, tokenizer(template)) == AnswerRegion()
    found = AnswerRegion.of(other, tokenizer("[THINK] [/THINK]"))
    assert region_of("[THINK]a[/THINK]b <think>", region=found) == "b <think>"
    with pytest.raises(ConfigError, match=re.escape("'[THINK]' and '[/THINK]' are special tokens")):
        AnswerRegion.of(other, tokenizer("[THINK] [/THINK]", ("[THINK]", "[/THINK]")))


def test_tags_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    for tags in ("['<think>', '<think>']", "['', '</think>']", "['think>', '</think>']"):
        assert "reward.thinking_tags" in str(faults_of(tmp_path, f"reward.thinking_tags={tags}")), tags
    assert "answers count anywhere" in str(faults_of(tmp_path, "reward.answer_region=anywhere", "reward.thinking_tags=['<a>', '<b>']"))


def test_the_documentation_tells_the_truth() -> None:
    text = (Path(__file__).parents[3] / "docs" / "verifiers.md").read_text("utf-8")
    table = text.split("| response | answer |")[1].split("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 8
    for cell, expected in rows:
        response = re.findall("`([^`]+)`", cell)[0]
        before = "<think>" if "the prompt" in cell else ""
        shown = stated_answer(GradeItem("math", response, "5", {ANSWER_START: REGION.start([response], [before])}))
        assert (shown or "none") == expected.strip(), cell
