"""The tokenizer of a model folder, and the ids of the model that it lacks."""

from __future__ import annotations

from typing import Any

from vapo_mcore.errors import CheckpointError


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder. Raises CheckpointError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever it runs into, the tokenizers library a bare Exception
        raise CheckpointError(f"the tokenizer of {folder!r} cannot be loaded: {type(error).__name__}: {error}") from error


def unknown_token_ids(tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Ids below ``vocab_size``, the model's, that the tokenizer lacks, sorted: rows that pad the vocabulary (Qwen2.5 has 151,936 for
    151,665 tokens), or gaps. They decode to nothing, so they must never be sampled or take part in a softmax.

    Raises CheckpointError where no id is left.
    """
    known = set(tokenizer.get_vocab().values())
    unknown = tuple(token for token in range(vocab_size) if token not in known)
    if len(unknown) == vocab_size:
        raise CheckpointError(f"the tokenizer has none of the model's {vocab_size} token ids: it is another model's")
    return unknown
