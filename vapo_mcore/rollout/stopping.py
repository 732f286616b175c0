"""Stop tokens: the ids that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vapo_mcore.config.schema import Config
from vapo_mcore.data.chat_template import end_of_turn
from vapo_mcore.errors import ConfigError
from vapo_mcore.rollout.hf_folder import stop_token_ids


def stop_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the sorted ids that end a response.

    These are the ids of the model's generation config, the tokenizer's EOS token, the token with which the chat template ends an
    assistant's turn, and ``rollout.stop_token_ids``. A base model's generation config often has only the end-of-document token, while
    its template ends turns with another one.

    Raises CheckpointError if there are none, ConfigError for configured ids that the tokenizer lacks.
    """
    ids = set(config.rollout.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    end = end_of_turn(tokenizer, config.data.chat_template_kwargs) if config.data.chat_template and tokenizer.chat_template else None
    if end is not None:
        ids.add(end.token_id)
    known = set(tokenizer.get_vocab().values())
    unknown = sorted(set(config.rollout.stop_token_ids) - known)
    if unknown:
        raise ConfigError(f"rollout.stop_token_ids: not ids of the model's tokenizer: {', '.join(map(str, unknown))}")
    return tuple(sorted({*ids, *stop_token_ids(config.model.path, required=not ids)}))


def described(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Describe the stop tokens for the log."""
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    return "a response ends with " + " or ".join(f"{name!r} ({number})" for name, number in zip(names, token_ids, strict=True))
