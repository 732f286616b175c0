"""Stop tokens: the ids that end a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vapo_mcore.config.schema import Config
from vapo_mcore.data.chat_template import end_of_turn
from vapo_mcore.data.text_positions import completing_tokens
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


def described(token_ids: Sequence[int], tokenizer: Any, texts: StopTexts | None = None) -> str:
    """Describe the stop tokens and texts for the log."""
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    ends = [f"{name!r} ({number})" for name, number in zip(names, token_ids, strict=True)]
    ends += [] if texts is None else [f"the text {text!r}" for text in texts.texts]
    return "a response ends with " + " or ".join(ends)


@dataclass(frozen=True)
class StopTexts:
    """Texts that end a response (``rollout.stop``), searched for in the decoded text, which has no special tokens."""

    tokenizer: Any
    texts: tuple[str, ...]

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> StopTexts | None:
        """Return the configured stop texts, or None. Raises ConfigError for texts that contain a special token."""
        if not config.rollout.stop:
            return None
        special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        found = [(text, token) for text in config.rollout.stop for token in special if token and token in text]
        if found:
            faults = "; ".join(
                f"{text!r} has the special token {token!r}, give rollout.stop_token_ids: [{special[token]}]" for text, token in found
            )
            raise ConfigError(f"rollout.stop: special tokens are left out of a response's text: {faults}")
        return cls(tokenizer, config.rollout.stop)

    @property
    def window(self) -> int:
        """Return the largest number of tokens of the longest text: at most four per character, plus a few special ones."""
        return 4 * max(map(len, self.texts)) + 4

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last ``window`` tokens may complete a text; cheap, called after each token."""
        tail = self.tokenizer.decode(token_ids[-self.window :], skip_special_tokens=True)
        return any(text in tail for text in self.texts)

    def end(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to and including the one that completes the first of the texts; None without any."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [text.find(stop) + len(stop) for stop in self.texts if stop in text]
        return completing_tokens(self.tokenizer, token_ids, [min(ends)])[0] + 1 if ends else None

    def end_over_cut(self, before: Sequence[int], token_ids: Sequence[int]) -> int | None:
        """Return the number of ``token_ids`` up to the one that completes the first of the texts; None without any.

        A text may begin in ``before``, the tokens of earlier steps, which the engine does not see. A text that also ends there is ignored:
        the run had other stop texts then.
        """
        whole = [*before, *token_ids]
        text = self.tokenizer.decode(whole, skip_special_tokens=True)
        ends = sorted({place + len(stop) for stop in self.texts for place in _places(text, stop)})
        counts = (completing_tokens(self.tokenizer, whole, [end])[0] + 1 - len(before) for end in ends)
        return next((count for count in counts if count > 0), None)


def _places(text: str, part: str) -> Iterator[int]:
    """Yield the positions at which ``part`` begins in ``text``, overlapping ones included."""
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)


_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
"""Texts with which common model families end a turn or a document."""


def end_of_turn_texts(config: Config, tokenizer: Any) -> tuple[str, ...]:
    """Return texts that end a turn. In a truncated response they show that the engine did not stop where the model did."""
    texts = {*_END_TEXTS, str(tokenizer.eos_token or "")}
    end = end_of_turn(tokenizer, config.data.chat_template_kwargs) if config.data.chat_template and tokenizer.chat_template else None
    return tuple(sorted(text for text in {*texts, "" if end is None else end.text} if text.strip()))
