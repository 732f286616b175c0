"""Detection of the columns with prompt and answer: from ``data.*.fields`` if set, else from known schemas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from vapo_mcore.config.schema import FieldsConfig

_LOOKED_AT = 100


@dataclass(frozen=True)
class Schema:
    """Dotted field names of prompt and answer. ``marker``: the answer is the text after it in the field."""

    name: str
    prompt: str
    answer: str
    marker: str | None = None


_PROMPTS = ("prompt", "problem", "question", "Problem", "Question")
_ANSWERS = ("answer", "Answer", "final_answer", "expected_answer", "ground_truth")
PLAIN = Schema("prompt and answer", "prompt", "answer")
VERL = Schema("verl (DAPO-Math-17k)", "prompt", "reward_model.ground_truth")
GSM8K = Schema("GSM8K", "question", "answer", marker="####")


def recognise(row: dict[str, Any]) -> Schema | None:
    """Return the schema of a row, or None if no column or several columns could hold the prompt or the answer.

    Tried in order: ``prompt`` and ``answer``; verl's ``prompt`` and ``reward_model.ground_truth``; GSM8K's ``question`` and
    ``answer`` with the final answer after ``####``; one column of ``_PROMPTS`` and one of ``_ANSWERS`` (MATH-500, AIME).
    """
    if "prompt" in row and "answer" in row:
        return PLAIN
    reward = row.get("reward_model")
    if "prompt" in row and isinstance(reward, dict) and "ground_truth" in reward:
        return VERL
    answer = row.get("answer")
    if "question" in row and isinstance(answer, str) and "####" in answer:
        return GSM8K
    prompts, answers = ([name for name in names if name in row] for names in (_PROMPTS, _ANSWERS))
    if len(prompts) == len(answers) == 1:
        return Schema(f"{prompts[0]} and {answers[0]}", prompts[0], answers[0])
    return None


def choose_schema(fields: FieldsConfig, rows: Iterator[tuple[int, dict[str, Any]]]) -> tuple[Schema, Iterator[tuple[int, dict[str, Any]]]]:
    """Return the schema of ``rows`` and an iterator over all of them.

    Uses the columns of ``fields`` where set, else the first schema recognised among the first ``_LOOKED_AT`` rows. Falls back to
    ``PLAIN``, whose columns are then reported as missing.
    """
    first = list(islice(rows, _LOOKED_AT))
    known = next((schema for _, row in first if (schema := recognise(row)) is not None), PLAIN)
    if fields.prompt is None and fields.answer is None:
        return known, chain(first, rows)
    marker = known.marker if fields.answer in (None, known.answer) else None
    return Schema("data.fields", fields.prompt or known.prompt, fields.answer or known.answer, marker), chain(first, rows)
