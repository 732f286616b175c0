"""From a decoded response to the sampled tokens that wrote it, and back. The text is never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def completing_tokens(tokenizer: Any, token_ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each place in the decoded text, the number of the first token whose prefix decodes to so many characters or more.

    ``ends`` lie between 1 and the length of ``tokenizer.decode(token_ids, skip_special_tokens=True)``. A bisection, so a place
    costs the decoding of about log2(tokens) prefixes.
    """
    text = tokenizer.decode(token_ids, skip_special_tokens=True) if ends else ""
    known: dict[int, int] = {}

    def characters(tokens: int) -> int:
        """Characters that the first ``tokens`` tokens write for good: a last one whose bytes are not all there yet is another then."""
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
"""Bytes of one in UTF-8, and so the most tokens that write one together."""
_UNFINISHED = "\ufffd"


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, special tokens included; joined, they are ``tokenizer.decode(token_ids)``.

    A character that several tokens write stands at the last of them, the others have "". Where every token alone decodes to its part of
    the text, that is all; else each is decoded behind the one before it, which costs two short decodings a token.
    """
    whole = tokenizer.decode(token_ids)
    alone = [tokenizer.decode([token]) for token in token_ids]
    if "".join(alone) == whole:
        return alone
    texts: list[str] = []
    context = done = 0  # tokens before ``done`` are told; those from ``context`` on stand before the next, for spaces and the like
    for end in range(1, len(token_ids) + 1):
        told, text = tokenizer.decode(token_ids[context:done]), tokenizer.decode(token_ids[context:end])
        if text.endswith(_UNFINISHED) and end < len(token_ids) and end - done < _LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text[len(told) :])
        context, done = done, end
    return texts
