"""Chat templates: loading, checking their variables, rendering, the end-of-turn token, and control tokens in the data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from vapo_mcore.config.schema import DataConfig
from vapo_mcore.data.tokenizer import load_tokenizer
from vapo_mcore.errors import ConfigError

Messages = list[dict[str, str]]

_OURS = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
"""Variables that the trainer or transformers passes to a template."""


def chat_tokenizer(folder: str, data: DataConfig) -> Any:
    """Load the tokenizer of a model folder and set the configured chat template.

    Raises CheckpointError if the tokenizer cannot be loaded, ConfigError for an invalid template file or ``chat_template_kwargs`` that the
    template does not accept.
    """
    tokenizer = load_tokenizer(folder)
    if isinstance(data.chat_template, str):
        tokenizer.chat_template = _read_template(data.chat_template)
    if data.chat_template and tokenizer.chat_template:
        _check_kwargs(tokenizer, data)
    return tokenizer


def render(tokenizer: Any, messages: Messages, kwargs: dict[str, Any], *, add_generation_prompt: bool = True) -> str:
    """Render a conversation as text, up to the start of the assistant's next turn."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs))


def _read_template(path: str) -> str:
    from jinja2 import TemplateSyntaxError

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"data.chat_template: {path!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.chat_template: {path!r} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"data.chat_template: {path!r} is empty")
    try:
        variables_read(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"data.chat_template: {path!r} is no Jinja template: line {error.lineno}: {error.message}") from error
    return text


def variables_read(template: str) -> set[str]:
    """Return the variables that a template reads but does not set."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment  # with the tags that transformers adds to Jinja
    return meta.find_undeclared_variables(environment.parse(template))


def _check_kwargs(tokenizer: Any, data: DataConfig) -> None:
    """Raise one ConfigError for all keys of ``data.chat_template_kwargs`` that have no effect or that the trainer sets itself."""
    if not data.chat_template_kwargs:
        return
    template = tokenizer.chat_template
    known = variables_read(template["default"] if isinstance(template, dict) else template)
    given_otherwise = {*_OURS, *tokenizer.special_tokens_map}
    free = sorted(known - given_otherwise - {"raise_exception", "strftime_now"})
    faults = []
    for key in data.chat_template_kwargs:
        near = get_close_matches(key, free, n=1)
        if key in given_otherwise:
            faults.append(f"data.chat_template_kwargs.{key}: the trainer sets this variable; remove it")
        elif key not in known:
            hint = f"; did you mean {near[0]!r}?" if near else f"; it reads {', '.join(free) or 'no other variables'}"
            faults.append(f"data.chat_template_kwargs.{key}: the chat template does not read it, so it has no effect{hint}")
    if faults:
        raise ConfigError("\n".join(faults))


@dataclass(frozen=True)
class EndOfTurn:
    """The token with which the chat template ends an assistant's turn."""

    text: str
    token_id: int


def turn_parts(tokenizer: Any, kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Return what the template writes before and after a user message that follows an assistant turn, up to the next assistant turn.

    None if the template does not reproduce the second user message verbatim.
    """
    turn, answer = "qturnq", "qanswerq"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": turn}, {"role": "user", "content": answer}]
    text = _try_render(tokenizer, messages, kwargs)
    if text is None or text.count(turn) != 1 or text.count(answer) != 1 or text.index(turn) > text.index(answer):
        return None
    _, _, rest = text.partition(turn)
    before, _, after = rest.partition(answer)
    return before, after


def end_of_turn(tokenizer: Any, kwargs: dict[str, Any]) -> EndOfTurn | None:
    """Return the token that follows an assistant's text; None if the template ends a turn with ordinary text."""
    parts = turn_parts(tokenizer, kwargs)
    if parts is not None:
        rest = parts[0]
    else:
        text = _try_render(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "qturnq"}], kwargs, last=True)
        rest = "" if text is None else text.partition("qturnq")[2]
    rest = rest.lstrip()
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    found = max((text for text in added if text and rest.startswith(text)), key=len, default=None)
    return None if found is None else EndOfTurn(found, added[found])


def _try_render(tokenizer: Any, messages: Messages, kwargs: dict[str, Any], *, last: bool = False) -> str | None:
    """Return the rendered conversation; None if the template rejects it or fails."""
    from jinja2 import TemplateError

    try:
        return render(tokenizer, messages, kwargs, add_generation_prompt=not last)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
        return None


@dataclass
class ControlTokens:
    """Tokens that structure a conversation: the tokenizer's special tokens and those that the chat template writes.

    In the text of a row they would act as commands to the model, for example end the user's turn and begin the assistant's.
    """

    tokenizer: Any
    ids: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, *, chat_template: bool, kwargs: dict[str, Any]) -> ControlTokens:
        added = tokenizer.added_tokens_decoder
        ids = {str(token): number for number, token in added.items() if token.special}
        if chat_template:
            user, assistant = ({"role": role, "content": "q"} for role in ("user", "assistant"))
            text = _try_render(tokenizer, [user, assistant, user], kwargs) or _try_render(tokenizer, [user], kwargs) or ""
            ids |= {str(token): number for number, token in added.items() if str(token) in text}
        return cls(tokenizer, {text: number for text, number in ids.items() if text.strip()})

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the control tokens' names, longest first; matches nothing if there are none."""
        names = sorted(self.ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) if names else r"(?!)")

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(self.ids.values())

    def count(self, token_ids: Sequence[int]) -> Counter[int]:
        """Count each control token in a prompt."""
        return Counter(token for token in token_ids if token in self._numbers)

    def names(self, counts: Counter[int]) -> str:
        """Return the names of the counted tokens, for a message."""
        return ", ".join(repr(text) for text, number in self.ids.items() if counts[number])

    def encode_plain(self, text: str) -> list[int]:
        """Encode ``text``, treating names of control tokens as ordinary text."""
        ids = self._split(text)
        if not self.count(ids):
            return ids
        # The tokenizer matches tokens that are not marked special in any text: split each name in two, so that no token matches.
        pieces, start = [], 0
        for match in self.pattern.finditer(text):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [token for piece in (*pieces, text[start:]) for token in self._split(piece)]

    def _split(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True) if text else {"input_ids": []}
        return list(encoded["input_ids"])

    def encode_pieces(self, text: str, restore: dict[str, str]) -> list[int]:
        """Encode a rendered prompt: names in ``text`` become control tokens, those that ``restore`` puts back become ordinary text."""
        ids: list[int] = []
        start = 0
        for match in self.pattern.finditer(text):
            ids += [*self.encode_plain(_restored(text[start : match.start()], restore)), self.ids[match.group()]]
            start = match.end()
        return ids + self.encode_plain(_restored(text[start:], restore))

    def hide(self, text: str) -> tuple[str, dict[str, str]]:
        """Replace names of control tokens in ``text`` by private-use characters; returns the text and the map back to the names."""
        names = sorted(self.ids)
        stand_ins = {name: f"\ue000{chr(0xE100 + number)}\ue001" for number, name in enumerate(names)}
        return self.pattern.sub(lambda match: stand_ins[match.group()], text), {mark: name for name, mark in stand_ins.items()}


def _restored(text: str, restore: dict[str, str]) -> str:
    return re.sub("\ue000.\ue001", lambda match: restore.get(match.group(), match.group()), text)
