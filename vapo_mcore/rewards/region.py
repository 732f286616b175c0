"""Find the part of a response in which its answer counts (``reward.answer_region``): a box inside thinking is not the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vapo_mcore.environments.types import ANSWER_START
from vapo_mcore.errors import ConfigError

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config


@dataclass(frozen=True)
class AnswerRegion:
    """``tags``: the opening and the closing tag of thinking; None: the answer counts anywhere."""

    tags: tuple[str, str] | None = None

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> AnswerRegion:
        """Return the configured region; by default the text after thinking, if the chat template has both tags.

        Raises ConfigError for a tag that is a special token: such tokens are not part of the text that verifiers read.
        """
        kind, tags = config.reward.answer_region, config.reward.thinking_tags
        if kind is None:
            template = str(tokenizer.chat_template) if config.data.chat_template and tokenizer.chat_template else ""
            kind = "after_thinking" if all(tag in template for tag in tags) else "anywhere"
        if kind == "anywhere":
            return cls()
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        unseen = [tag for tag in tags if tag in special]
        if unseen:
            raise ConfigError(
                f"reward.thinking_tags: {' and '.join(map(repr, unseen))} are special tokens of the model's tokenizer, which are left out "
                "of the text that verifiers read; give tags that the model writes as text, or set reward.answer_region: anywhere"
            )
        return cls(tags)

    def describe(self) -> str:
        """Describe the region in one line for the log."""
        return "answers count anywhere in a response" if self.tags is None else f"answers count after {self.tags[1]!r}"

    def start(self, turns: Sequence[str], before: Sequence[str]) -> int:
        """Return the number of characters before the answer region; the response consists of its turns, joined by line breaks.

        The region follows the last thinking. It is empty if the last turn ends inside thinking, as truncated responses may. Thinking can
        be nested: it ends after as many closing tags as opening ones. A closing tag without an opening one also ends thinking.
        ``before``: text before each turn; if it ends with the opening tag, the turn begins inside thinking.
        """
        if self.tags is None:
            return 0
        opening, closing = self.tags
        pattern = re.compile(f"{re.escape(opening)}|{re.escape(closing)}")
        begin = start = 0
        for turn, context in zip(turns, before, strict=True):
            depth = int(context.rstrip().endswith(opening))
            for tag in pattern.finditer(turn):
                if tag.group() == opening:
                    depth += 1
                else:
                    depth = max(0, depth - 1)
                    start = begin + tag.end()
            begin += len(turn) + 1
            if depth:
                start = begin
        return min(start, len("\n".join(turns)))


def answer_region(response: str, metadata: Mapping[str, Any]) -> str:
    """Return the part of a response in which its answer counts."""
    start: int = metadata.get(ANSWER_START, 0)
    return response[start:]
