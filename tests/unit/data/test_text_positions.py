"""Places in a decoded response, found among its tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vapo_mcore.data.text_positions import completing_tokens, token_texts


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, as byte-level tokenizers write what they have no longer token for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({text: number for number, text in enumerate([*alphabet, "<eos>"])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def test_each_character_is_found_at_the_token_that_completes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "1+1=2; \u00e9\u20ac\U0001f600 ok\n" * 5
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    expected, done = [], 0
    for character in text:
        done += len(character.encode())
        expected.append(done - 1)
    assert completing_tokens(tokenizer, ids, range(1, len(text) + 1)) == expected


def test_bytes_that_are_no_character_are_found_where_they_stand(tokenizer: PreTrainedTokenizerFast) -> None:
    letter, stray = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("\u00e9", add_special_tokens=False)[1:]
    ids = letter + stray + letter + stray + stray
    assert tokenizer.decode(ids) == "a\ufffda\ufffd\ufffd"
    assert completing_tokens(tokenizer, ids, range(1, 6)) == [0, 1, 2, 3, 4]
    assert completing_tokens(tokenizer, ids, []) == []


def test_the_text_of_each_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """A character of several tokens stands at the last of them; bytes that never become one are not waited for."""
    text = "1 \u00e9\u20ac\n"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert token_texts(tokenizer, ids) == ["1", " ", "", "\u00e9", "", "", "\u20ac", "\n", "<eos>"]
    stray = tokenizer.encode("\u00e9", add_special_tokens=False)[1:]
    ids = ids[:1] + stray * 6 + ids[:2]
    assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)
    assert token_texts(tokenizer, []) == []


def test_the_text_of_each_token_where_spaces_depend_on_the_token_before() -> None:
    """A decoder of words, as sentencepiece's: a token alone decodes without its space."""
    core = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "s": 2}, unk_token="s"))
    core.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=core)
    assert words.decode([1]) == "two"
    assert token_texts(words, [0, 1, 2, 1]) == ["one", " two", "s", " two"]
