"""Mapping between positions in a decoded response and its sampled tokens, without re-encoding the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def completing_tokens(tokenizer: Any, token_ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return for each end in the decoded text the index of the token that completes it: the shortest prefix decodes to >= end characters.

    ``ends`` lie between 1 and the length of ``tokenizer.decode(token_ids, skip_special_tokens=True)``. Uses bisection: each end decodes
    about log2(tokens) prefixes.
    """
    text = tokenizer.decode(token_ids, skip_special_tokens=True) if ends else ""
    known: dict[int, int] = {}

    def characters(tokens: int) -> int:
        """Count the final characters of the first ``tokens`` tokens; an incomplete last character still decodes differently."""
        if tokens not in known:
            prefix = tokenizer.decode(token_ids[:tokens], skip_special_tokens=True)
            while not text.startswith(prefix):
                prefix = prefix[:-1]
            known[tokens] = len(prefix)
        return known[tokens]

    found = []
    for end in ends:
        low, high = 0, len(token_ids)  # the first ``low`` tokens are too few; ``high`` are enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if characters(middle) >= end else (middle, high)
        found.append(high - 1)
    return found


_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the maximum number of tokens that form one."""
_UNFINISHED = "\ufffd"


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included; joined, they equal ``tokenizer.decode(token_ids)``.

    A character formed by several tokens is assigned to the last of them, the others get "". If the tokens decoded one by one do not join
    to the text, each is decoded together with the one before it, which takes two short decodings per token.
    """
    whole = tokenizer.decode(token_ids)
    alone = [tokenizer.decode([token]) for token in token_ids]
    if "".join(alone) == whole:
        return alone
    texts: list[str] = []
    context = done = 0  # tokens before ``done`` have their text; those from ``context`` on provide context (leading spaces, ...)
    for end in range(1, len(token_ids) + 1):
        previous, text = tokenizer.decode(token_ids[context:done]), tokenizer.decode(token_ids[context:end])
        if text.endswith(_UNFINISHED) and end < len(token_ids) and end - done < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(previous) :])
        context, done = done, end
    return texts
