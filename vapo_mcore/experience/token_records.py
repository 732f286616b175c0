"""Build the per-token columns of the samples file: log-probs, value, return and advantage of each response token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vapo_mcore.data.text_positions import token_texts
from vapo_mcore.experience.batches import Experience

DIGITS = 4
"""Significant digits, limited to keep the samples file small: a long response has thousands of tokens."""
COLUMNS = {
    "rollout_logprobs": "rollout_logprob",
    "old_logprobs": "logprob",
    "values": "value",
    "returns": "return",
    "advantages": "advantage",
}
"""Maps token tensors to the names of their columns."""


def token_columns(experience: Experience, shown: Collection[int], tokenizer: Any) -> dict[int, dict[str, list[Any]]]:
    """Return the per-token columns of the rows in ``shown`` (global row numbers) that this rank owns.

    Returns: for each row, ``text`` (the text that each token adds) and, for each column of ``COLUMNS`` that the step has, one number per
        token; None if the token carries no loss (an environment wrote it, or the response is excluded from training).
    """
    batch = experience.batch
    found: dict[int, dict[str, list[Any]]] = {}
    for number, row in enumerate(batch.row_ids.tolist()):
        if row not in shown:
            continue
        start, end = batch.cu_seqlens[number : number + 2].tolist()
        start += int(batch.rows.prompt_length[number])
        trained = batch["response_mask"][start:end].tolist()
        columns: dict[str, list[Any]] = {"text": token_texts(tokenizer, batch["tokens"][start:end].tolist())}
        for name, column in COLUMNS.items():
            if name in batch:
                numbers = batch[name][start:end].tolist()
                columns[column] = [_rounded(x) if mine else None for x, mine in zip(numbers, trained, strict=True)]
        found[row] = columns
    return found


def merged(columns: dict[str, list[Any]], more: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns of a response from two experiences, in the order of ``token_columns``; entries of ``columns`` come first."""
    found: dict[str, list[Any]] = {}
    for name in ("text", *COLUMNS.values()):
        given, other = columns.get(name), more.get(name)
        if given is not None and other is not None:
            found[name] = [b if a is None else a for a, b in zip(given, other, strict=True)]
        elif given is not None:
            found[name] = given
        elif other is not None:
            found[name] = other
    return found


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
