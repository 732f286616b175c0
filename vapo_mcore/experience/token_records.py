"""What training made of the tokens of the shown responses: the columns ``tokens`` of the samples file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vapo_mcore.data.text_positions import token_texts
from vapo_mcore.experience.batches import Experience

DIGITS = 4
"""Significant digits of the numbers: they are looked at, and a long response has thousands."""
COLUMNS = {
    "rollout_logprobs": "rollout_logprob",
    "old_logprobs": "logprob",
    "values": "value",
    "returns": "return",
    "advantages": "advantage",
}
"""Token tensors that are written, and the names of their columns."""


def token_columns(experience: Experience, shown: Collection[int], tokenizer: Any) -> dict[int, dict[str, list[Any]]]:
    """For each row of ``shown`` (numbers of replicated rows) that this rank owns, its response token by token.

    Returns: by row, ``text`` (what each token adds to the text) and a number or None a token in each column of ``COLUMNS`` that the step
        has; None where the token carries no loss (an environment wrote it, or the response is left out of training).
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


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
