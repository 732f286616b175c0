"""A damaged tokenizer is one message."""

from pathlib import Path

import pytest

from vapo_mcore.data.tokenizer import load_tokenizer
from vapo_mcore.errors import CheckpointError


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"added_tokens": 3}', '{"added_tokens": [], "model": {"type": "x"}}'])
def test_a_damaged_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match=r"^the tokenizer of .* cannot be loaded: [A-Za-z]+"):
        load_tokenizer(str(tmp_path))
