"""Graders: labelled answers of a built-in corpus, and the recipe's own ground truths against themselves and against one another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.record import Measurement, fails, holds, not_applicable, warns
from vapo_mcore.certify.tolerances import BY_NAME
from vapo_mcore.collectives import broadcast_object, fail_together
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.rewards import GradeItem, Verdict, VerifierPool

ROWS = 48
COLLISIONS = BY_NAME["graders/other_truths"].float32
"""Share of foreign truths that may be graded right before it is the grader's fault: different texts may have equal values (1/2, 0.5)."""
FORMS: Mapping[str, str] = {
    "math": "The answer is \\boxed{{{}}}.",
    "math_steps": "The answer is \\boxed{{{}}}.",
    "math_last_number": "The answer is \\boxed{{{}}}.",
    "math_answer_line": "Answer: {}",
    "exact": "<answer>{}</answer>",
    "multiple_choice": "The answer is \\boxed{{{}}}.",
    "reasoning_gym": "<answer>{}</answer>",
}
"""A response that gives an answer, by verifier. Of other verifiers the first of ``OTHER_FORMS`` that is graded right is taken."""
OTHER_FORMS = ("{}", "The answer is \\boxed{{{}}}.", "<answer>{}</answer>", "Answer: {}")
WITHOUT_ANSWER: Mapping[str, str] = {"code": "tests", "regex": "a pattern"}
"""Verifiers whose ground truth is not an answer, and what it is."""


def run(bench: Bench) -> list[Measurement]:
    """Grade on rank 0 in the process pool of the recipe."""
    pool, prompts = bench.verifiers, bench.checked_prompts(ROWS)
    found: list[Measurement] = []
    with fail_together():
        if pool is not None:
            by_verifier: dict[str, list[Prompt]] = {}
            for prompt in prompts:
                by_verifier.setdefault(prompt.verifier, []).append(prompt)
            for verifier, rows in sorted(by_verifier.items()):
                found.append(_corpus(pool, verifier))
                found += _own_rows(pool, verifier, rows)
    return broadcast_object(found)


@dataclass(frozen=True)
class Labelled:
    """One entry of the corpus: whether ``response`` is right for ``ground_truth``."""

    verifier: str
    ground_truth: str
    response: str
    correct: bool
    metadata: dict[str, object]


def corpus() -> list[Labelled]:
    """Return the built-in labelled answers."""
    text = files("vapo_mcore.certify").joinpath("assets", "answers.jsonl").read_text(encoding="utf-8")
    return [Labelled(**{"metadata": {}, **json.loads(line)}) for line in text.splitlines()]


def _corpus(pool: VerifierPool, verifier: str) -> Measurement:
    what, tolerance = f"labelled answers, {verifier}", "every label"
    entries = [entry for entry in corpus() if entry.verifier == verifier]
    if not entries:
        return not_applicable(what, "the built-in corpus has no answers for this verifier")
    verdicts = pool.grade([GradeItem(verifier, entry.response, entry.ground_truth, entry.metadata) for entry in entries])
    wrong = [
        f"{entry.response!r} for {entry.ground_truth!r} is {_said(verdict)}"
        for entry, verdict in zip(entries, verdicts, strict=True)
        if verdict.error is not None or verdict.correct != entry.correct
    ]
    if wrong:
        remedy = "the graders' packages are not those that the verifier was made for: compare the versions with requirements/"
        return fails(what, f"{len(wrong)} of {len(entries)} are graded wrongly: {'; '.join(wrong[:3])}", tolerance, remedy, len(wrong))
    return holds(what, f"{len(entries)} answers graded as labelled", tolerance, 0.0)


def _own_rows(pool: VerifierPool, verifier: str, rows: Sequence[Prompt]) -> list[Measurement]:
    """Grade each row's truth against itself and against the next row with a different truth."""
    if verifier in WITHOUT_ANSWER:
        return [not_applicable(f"own truths, {verifier}", f"the ground truth is {WITHOUT_ANSWER[verifier]}, not an answer")]
    known = FORMS.get(verifier)
    form, verdicts = max(
        ((form, _grade(pool, rows, [row.ground_truth for row in rows], form)) for form in ((known,) if known else OTHER_FORMS)),
        key=lambda tried: sum(verdict.correct for verdict in tried[1]),
    )
    return [_own_right(verifier, rows, verdicts, known is not None), _others_wrong(pool, verifier, rows, form)]


def _grade(pool: VerifierPool, rows: Sequence[Prompt], answers: Sequence[str], form: str) -> list[Verdict]:
    return pool.grade(
        [GradeItem(row.verifier, form.format(answer), row.ground_truth, row.metadata) for row, answer in zip(rows, answers, strict=True)]
    )


def _own_right(verifier: str, rows: Sequence[Prompt], verdicts: Sequence[Verdict], known: bool) -> Measurement:
    what, tolerance = f"own truth graded right, {verifier}", "all rows of the sample"
    wrong = [
        f"{row.prompt_id}: {row.ground_truth[:60]!r} is {_said(verdict)}"
        for row, verdict in zip(rows, verdicts, strict=True)
        if not verdict.correct
    ]
    if not wrong:
        return holds(what, f"{len(rows)} rows", tolerance, 0.0)
    shown = f"{len(wrong)} of {len(rows)} truths are not graded right: {'; '.join(wrong[:3])}"
    if not known and len(wrong) == len(rows):
        return warns(
            what, shown, tolerance, "none of the usual forms of an answer is right for this verifier: check it by hand", len(wrong)
        )
    return fails(what, shown, tolerance, "fix these rows, or use the verifier that reads such truths (docs/verifiers.md)", len(wrong))


def _others_wrong(pool: VerifierPool, verifier: str, rows: Sequence[Prompt], form: str) -> Measurement:
    what, tolerance = f"other truths graded wrong, {verifier}", f"all but {COLLISIONS:.0%}, which may be equal values in other words"
    pairs = []
    for number, row in enumerate(rows):
        others = [*rows[number + 1 :], *rows[:number]]
        other = next((other for other in others if _plain(other.ground_truth) != _plain(row.ground_truth)), None)
        if other is not None:
            pairs.append((row, other.ground_truth))
    if not pairs:
        return not_applicable(what, "all rows of the sample have the same truth")
    verdicts = _grade(pool, [row for row, _ in pairs], [answer for _, answer in pairs], form)
    right = [
        f"{row.prompt_id}: {answer[:60]!r} for {row.ground_truth[:60]!r}"
        for (row, answer), verdict in zip(pairs, verdicts, strict=True)
        if verdict.correct
    ]
    shown = f"{len(right)} of {len(pairs)} truths of other rows are graded right"
    if len(right) == len(pairs):
        return fails(what, f"{shown}: the grader calls everything right", tolerance, "fix the verifier of the data source", len(right))
    if len(right) > COLLISIONS * len(pairs):
        return fails(what, f"{shown}: {'; '.join(right[:3])}", tolerance, "fix the verifier of the data source", len(right))
    if right:
        return warns(what, f"{shown}: {'; '.join(right[:3])}", tolerance, "right if these are equal in value", len(right))
    return holds(what, shown, tolerance, 0.0)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _said(verdict: Verdict) -> str:
    return f"not graded ({verdict.error})" if verdict.error is not None else "called right" if verdict.correct else "called wrong"
