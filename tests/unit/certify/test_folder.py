"""The check ``folder``: tokens whose ids the model lacks are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vapo_mcore.certify.checks.folder import _vocabulary


def test_tokens_that_the_model_lacks_are_named() -> None:
    words = models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="<pad>")
    text = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", unk_token="<pad>")

    def found(rows: int, unknown: tuple[int, ...] = ()) -> Any:
        return _vocabulary(SimpleNamespace(architecture=SimpleNamespace(vocab_size=rows), tokenizer=text, unknown_token_ids=unknown))  # type: ignore[arg-type]

    assert found(len(text)).verdict == found(len(text) + 4, (3, 4, 5, 6)).verdict == "holds"
    short = found(2)
    assert (short.verdict, short.value) == ("fails", 1)
    assert short.measured == "the model has 2 rows, 1 tokens of the tokenizer have higher ids: 'b' (2)"
