"""Texts that end a response: where their last token is, and which texts cannot be looked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.unit.config_helpers import faults_of, load, write_base
from vapo_mcore.errors import ConfigError
from vapo_mcore.rollout.stopping import StopTexts, end_of_turn_texts

PIECES = ["\u0120Ans", "wer:", "\u01205", "</", "tool", ">", "\u010a", "\u00e2", "\u0124", "\u00ac", ">y", "<end>"]
"""In GPT-2's alphabet of bytes: a blank before, a line break, and the three bytes of a euro sign."""


def tokenizer() -> Any:
    backend = Tokenizer(WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token=PIECES[0]))
    backend.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("texts", "ids", "end"),
    [
        (("</tool>",), [0, 1, 2, 3, 4, 5, 2, 2], 6),
        (("</tool>",), [0, 1, 2, 3, 4, 10, 2], 6),  # the last token says more: it is kept whole
        (("</tool>",), [3, 4, 11, 5, 2], 4),  # a special token is no text
        (("</tool>",), [0, 1, 2, 3, 4], None),
        (("\n", "</tool>"), [0, 6, 3, 4, 5], 2),
        (("\u20ac",), [0, 7, 8, 9, 2], 4),  # complete with its third byte
        (("Answer:",), [0, 1, 0, 1], 2),
        (("\n",), [], None),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_text(texts: tuple[str, ...], ids: list[int], end: int | None) -> None:
    stops = StopTexts(tokenizer(), texts)
    assert stops.end(ids) == end
    completed = [length for length in range(1, len(ids) + 1) if stops.completed(ids[:length]) and stops.end(ids[:length]) is not None]
    assert completed[:1] == ([] if end is None else [end])


@pytest.mark.parametrize(
    ("texts", "before", "ids", "end"),
    [
        (("</tool>",), [0, 1, 3], [4, 5, 2], 2),
        (("</tool>",), [3, 4, 5, 2], [2, 3, 4, 5, 2], 4),  # one that ends before the cut ended nothing: the run had other stop texts
        (("</tool>",), [3, 4, 5, 2], [2, 2], None),
        (("</tool>", "\n"), [3, 4], [6, 5, 2], 1),
        (("\u20ac",), [2, 7], [8, 9, 2], 2),  # the bytes of one character on both sides
        (("\u20ac",), [2, 7, 8], [9], 1),
        (("\u20ac",), [2, 7], [8], None),
        (("</tool>",), [], [3, 4, 5], 3),
    ],
)
def test_a_text_may_begin_before_a_cut(texts: tuple[str, ...], before: list[int], ids: list[int], end: int | None) -> None:
    assert StopTexts(tokenizer(), texts).end_over_cut(before, ids) == end


def test_a_long_response_is_looked_at_by_its_end_alone() -> None:
    stops = StopTexts(tokenizer(), ("</tool>",))
    assert stops.window < 40
    assert not stops.completed([3, 4, 5] + [2] * 100) and stops.completed([2] * 100 + [3, 4, 5])


def test_texts_that_cannot_be_found_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    assert StopTexts.of(load(tmp_path), tokenizer()) is None
    assert StopTexts.of(load(tmp_path, "rollout.stop=['</tool>']"), tokenizer()).texts == ("</tool>",)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"'a<end>' has the special token '<end>', give rollout.stop_token_ids: \[11\]"):
        StopTexts.of(load(tmp_path, "rollout.stop=['a<end>']"), tokenizer())
    for texts in ("['']", "['a', 'a']"):
        assert "rollout.stop" in str(faults_of(tmp_path, f"rollout.stop={texts}"))


def test_ends_of_turns_are_those_of_the_tokenizer_and_of_common_models(tmp_path: Path) -> None:
    write_base(tmp_path)
    plain = SimpleNamespace(eos_token="<my_end>", chat_template=None)
    assert {"<my_end>", "<|im_end|>", "<|endoftext|>", "</s>"} <= set(end_of_turn_texts(load(tmp_path), plain))
