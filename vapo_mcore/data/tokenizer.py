"""The tokenizer of a model folder."""

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
