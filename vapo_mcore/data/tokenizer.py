"""Load a model folder's tokenizer, and find the vocabulary ids it does not define."""

from __future__ import annotations

from typing import Any

from vapo_mcore.errors import CheckpointError


def load_tokenizer(folder: str) -> Any:
    """Load the tokenizer of a model folder. Raises CheckpointError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # damaged files raise various types; the tokenizers library raises Exception itself
        raise CheckpointError(f"the tokenizer of {folder!r} cannot be loaded: {type(error).__name__}: {error}") from error


def unknown_token_ids(tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the ids below the model's ``vocab_size`` that the tokenizer does not define, sorted.

    These are padding rows of the vocabulary (Qwen2.5 has 151,936 rows for 151,665 tokens) or gaps. They decode to nothing, so they must
    be neither sampled nor included in a softmax. Raises CheckpointError if the tokenizer defines none of the ids.
    """
    known = set(tokenizer.get_vocab().values())
    unknown = tuple(token for token in range(vocab_size) if token not in known)
    if len(unknown) == vocab_size:
        raise CheckpointError(f"the tokenizer has none of the model's {vocab_size} token ids: it belongs to another model")
    return unknown
