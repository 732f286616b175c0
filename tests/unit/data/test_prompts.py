"""Prompt sources: every malformed row is reported, templates and limits apply, the order is seeded and resumable."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vapo_mcore.config.schema import DataConfig
from vapo_mcore.data.prompts import PromptDataset, check_files, split_evenly
from vapo_mcore.errors import DataError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def character_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character (its code point), so that lengths and ids are known by hand."""
    backend = Tokenizer(models.WordLevel({chr(i): i for i in range(0x250)}, unk_token="\x00"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = chat_template
    return tokenizer


TOKENIZER = character_tokenizer()


def data_config(*train: dict[str, Any], **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {"max_prompt_length": 1000, "chat_template": False}
    return DataConfig.model_validate({"train": list(train), **defaults, **settings})


def source(path: Path, **settings: Any) -> dict[str, Any]:
    return {"kind": "file", "path": str(path), "verifier": "exact", **settings}


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def dataset(config: DataConfig, seed: int = 0, tokenizer: Any = TOKENIZER) -> PromptDataset:
    return PromptDataset(config, "train", tokenizer, seed=seed)


def numbered(path: Path, count: int) -> Path:
    return write_jsonl(path, *({"prompt": f"question {i}", "answer": str(i)} for i in range(1, count + 1)))


# ---- reading ----------------------------------------------------------------------------------------------------------------------


def test_jsonl_json_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "answer": 4, "level": "a"}, {"prompt": "ä?", "answer": "b", "level": "c"}]
    write_jsonl(tmp_path / "p.jsonl", *rows)
    (tmp_path / "p.json").write_text(json.dumps(rows), encoding="utf-8")
    pyarrow.parquet.write_table(pa.table({"prompt": ["2+2=", "ä?"], "answer": ["4", "b"], "level": ["a", "c"]}), tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.json", "p.parquet"):
        items = dataset(data_config(source(tmp_path / name, name="set"))).items
        assert [item.prompt_id for item in items] == ["set/1", "set/2"]
        assert [item.token_ids for item in items] == [[ord(c) for c in "2+2="], [ord("ä"), ord("?")]]
        assert [item.ground_truth for item in items] == ["4", "b"]
        assert [item.metadata for item in items] == [{"level": "a"}, {"level": "c"}]
        assert {item.verifier for item in items} == {"exact"}


def test_dotted_fields_and_ids(tmp_path: Path) -> None:
    row = {"question": {"text": "q"}, "reward_model": {"ground_truth": "42"}, "index": 7}
    fields = {"prompt": "question.text", "answer": "reward_model.ground_truth", "id": "index"}
    (item,) = dataset(data_config(source(write_jsonl(tmp_path / "d.jsonl", row), name="dapo", fields=fields))).items
    assert (item.prompt_id, item.text, item.ground_truth) == ("dapo/7", "q", "42")


def test_reasoning_gym_items_carry_what_their_own_scorer_needs() -> None:
    config = data_config({"kind": "reasoning_gym", "task": "chain_sum", "size": 5, "seed": 3, "options": {"max_terms": 3}})
    items = dataset(config).items
    from reasoning_gym import create_dataset

    original = create_dataset("chain_sum", size=5, seed=3, max_terms=3)
    assert [(i.prompt_id, i.text, i.ground_truth) for i in items] == [
        (f"chain_sum/{n}", entry["question"], entry["answer"]) for n, entry in enumerate(original, start=1)
    ]
    for item in items:
        assert item.verifier == "reasoning_gym"
        assert (item.metadata["task"], item.metadata["options"]) == ("chain_sum", {"max_terms": 3})
        entry = {"question": item.metadata["question"], "answer": item.ground_truth, "metadata": item.metadata["entry_metadata"]}
        assert original.score_answer(item.ground_truth, entry) == 1.0
        assert original.score_answer(item.ground_truth + "0", entry) < 1.0


# ---- templates and limits ---------------------------------------------------------------------------------------------------------


def test_chat_template_system_prompt_and_suffix(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "hi", "answer": "1"}, {"prompt": messages, "answer": "2"})
    items = dataset(data_config(source(path), chat_template=True, system_prompt="S", prompt_suffix="!")).items
    assert [item.text for item in items] == ["<system>S<user>hi!<assistant>", "<system>S<user>a<assistant>b<user>c!<assistant>"]
    assert items[0].token_ids == [ord(c) for c in items[0].text]


def test_suffix_without_a_template(tmp_path: Path) -> None:
    (item,) = dataset(data_config(source(numbered(tmp_path / "d.jsonl", 1)), prompt_suffix="\n")).items
    assert item.text == "question 1\n"


def test_a_tokenizer_without_a_template_is_named(tmp_path: Path) -> None:
    config = data_config(source(numbered(tmp_path / "d.jsonl", 1)), chat_template=True)
    with pytest.raises(DataError, match="chat_template is true, but the model's tokenizer has no chat template"):
        dataset(config, tokenizer=character_tokenizer(chat_template=None))


def test_what_the_template_refuses_is_a_fault_of_the_row(tmp_path: Path) -> None:
    refusing = character_tokenizer("{{ raise_exception('no roles today') }}")
    config = data_config(source(numbered(tmp_path / "d.jsonl", 2)), chat_template=True)
    with pytest.raises(DataError, match=r"2 faults(.|\n)*d\.jsonl, row 1: the chat template rejects the messages: no roles today"):
        dataset(config, tokenizer=refusing)


def test_a_template_that_fails_is_a_fault_of_the_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "1+1", "answer": 2})
    with pytest.raises(DataError, match=r"row 1: the chat template fails: TypeError: "):
        dataset(data_config(source(path), chat_template=True), tokenizer=character_tokenizer("{{ messages[0].content + 1 }}"))


def test_long_prompts_are_refused_with_their_length_or_dropped_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", *({"prompt": "x" * n, "answer": "1"} for n in (3, 11, 10, 12)))
    with pytest.raises(
        DataError, match=r"2 faults(.|\n)*row 2: the prompt has 11 tokens, more than data.max_prompt_length = 10(.|\n)*row 4"
    ):
        dataset(data_config(source(path), max_prompt_length=10))
    kept = dataset(data_config(source(path), max_prompt_length=10, overlong_prompts="drop"))
    assert [item.prompt_id for item in kept.items] == ["d/1", "d/3"]
    assert kept.dropped == {"d": 2}
    assert kept.summary == "data.train: 2 prompts: d 2 (2 dropped, longer than 10 tokens)"
    with pytest.raises(DataError, match=r"all 4 prompts are longer than data\.max_prompt_length = 2 tokens"):
        dataset(data_config(source(path), max_prompt_length=2, overlong_prompts="drop"))


# ---- faults -----------------------------------------------------------------------------------------------------------------------

BAD_ROWS = [
    ({"answer": "1"}, "field 'prompt': missing; the row has answer"),
    ({"prompt": None, "answer": "1"}, "field 'prompt': is null"),
    ({"prompt": " \n", "answer": "1"}, "field 'prompt': is empty"),
    ({"prompt": 5, "answer": "1"}, "field 'prompt': must be a text or a list of messages, got a number: 5"),
    ({"prompt": "\ud800", "answer": "1"}, "field 'prompt': is not valid Unicode: lone surrogate at position 0"),
    ({"prompt": [{"role": "user", "content": "x"}], "answer": "1"}, "a list of messages needs data.chat_template: true"),
    ({"prompt": "x"}, "field 'answer': missing"),
    ({"prompt": "x", "answer": None}, "field 'answer': is null"),
    ({"prompt": "x", "answer": ""}, "field 'answer': is empty"),
    ({"prompt": "x", "answer": [[1]]}, "field 'answer[0]': must be a text or a finite number, got a list: [1]"),
    ({"prompt": "x", "answer": True}, "field 'answer': must be a text or a finite number, got a boolean: True"),
    ({"prompt": "x", "answer": float("nan")}, "field 'answer': must be a text or a finite number, got a number: nan"),
    (["x", "1"], "a row must be an object with named fields, got a list"),
    ("text", "a row must be an object with named fields, got text: 'text'"),
    (None, "a row must be an object with named fields, got null"),
]


@pytest.mark.parametrize(("row", "expected"), BAD_ROWS)
def test_every_kind_of_malformed_row_names_file_row_and_field(tmp_path: Path, row: Any, expected: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", {"prompt": "fine", "answer": "1"}, row)
    with pytest.raises(DataError) as error:
        check_files(data_config(source(path)))
    assert str(error.value).startswith(f"1 fault in the data: {path}: 1 (2 rows read)\n")
    assert f"{path}, row 2" in str(error.value)
    assert expected in str(error.value)


BAD_MESSAGES = [
    ([], "field 'prompt': is an empty list of messages"),
    ([{"role": "user"}], "field 'prompt[0]': a message must be an object with 'role' and 'content'"),
    (["hi"], "field 'prompt[0]': a message must be an object with 'role' and 'content', got text: 'hi'"),
    ([{"role": "human", "content": "x"}], "field 'prompt[0].role': must be one of system, user, assistant, tool, got 'human'"),
    ([{"role": "user", "content": None}], "field 'prompt[0].content': must be a text, got null"),
    ([{"role": "user", "content": ""}], "field 'prompt[0].content': is empty"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "the last message must be the user's, got 'assistant'"),
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "x"}], "has a system message, so data.system_prompt"),
]


@pytest.mark.parametrize(("messages", "expected"), BAD_MESSAGES)
def test_every_kind_of_malformed_message_list(tmp_path: Path, messages: Any, expected: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", {"prompt": messages, "answer": "1"})
    with pytest.raises(DataError) as error:
        check_files(data_config(source(path), chat_template=True, system_prompt="S"))
    assert f"{path}, row 1" in str(error.value)
    assert expected in str(error.value)


def test_invalid_lines_wrong_encoding_and_blank_lines(tmp_path: Path) -> None:
    good = b'{"prompt": "x", "answer": "1"}\n'
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b'{"prompt": "x", \n' + b'{"prompt": "\xe4", "answer": "1"}\n' + b"\n" + good + b"\n\n")
    with pytest.raises(DataError) as error:
        check_files(data_config(source(path)))
    message = str(error.value)
    assert message.startswith(f"3 faults in the data: {path}: 3 (4 rows read)")
    assert f"{path}, row 2: not valid JSON: " in message
    assert f"{path}, row 3: not UTF-8: byte 0xe4 at position 12" in message
    assert f"{path}, row 4: empty line" in message


def test_duplicate_ids_name_the_first_row(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "answer": "1", "id": n} for n in (1, 2, "1")] + [{"prompt": "x", "answer": "1", "id": 1.5}]
    with pytest.raises(DataError) as error:
        check_files(data_config(source(write_jsonl(tmp_path / "d.jsonl", *rows), fields={"id": "id"})))
    assert "row 3, field 'id': id '1' is already used by row 1" in str(error.value)
    assert "row 4, field 'id': must be a text or a whole number, got a number: 1.5" in str(error.value)


def test_dotted_field_through_something_else_than_an_object(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "x", "reward": "1"}, {"prompt": "x", "reward": {"truth": "1"}})
    with pytest.raises(DataError) as error:
        check_files(data_config(source(path, fields={"answer": "reward.ground_truth"})))
    assert "row 1, field 'reward.ground_truth': 'reward' must be an object with field 'ground_truth', got text: '1'" in str(error.value)
    assert "row 2, field 'reward.ground_truth': missing; 'reward' has truth" in str(error.value)


def test_all_files_of_both_splits_in_one_error_with_the_first_twenty_shown(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", *([{"prompt": "x"}] * 30 + [{"prompt": "x", "answer": "1"}] * 5))
    (tmp_path / "object.json").write_text('{"prompt": "x"}')
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "table.xlsx").write_text("prompt,answer\n")
    others = ["object.json", "broken.parquet", "empty.jsonl", "table.xlsx", "absent.jsonl"]
    config = data_config(source(many), eval=[source(tmp_path / name) for name in others])
    with pytest.raises(DataError) as error:
        check_files(config)
    message = str(error.value)
    assert message.startswith(f"35 faults in the data: {many}: 30 (35 rows read); ")
    assert message.endswith("... and 15 more")
    assert message.count("\n") == 21
    with pytest.raises(DataError) as error:
        check_files(config.model_copy(update={"train": config.eval}))
    for expected in (
        "object.json: a .json file must hold a list of rows, got an object",
        "broken.parquet: not readable as parquet: ",
        "empty.jsonl: has no rows",
        "table.xlsx: unknown format '.xlsx'; supported: .jsonl, .json, .csv, .tsv, .parquet and folders of datasets",
        "absent.jsonl: no such file",
    ):
        assert expected in str(error.value)


def test_malformed_and_too_long_rows_come_in_one_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "x" * 20, "answer": "1"}, {"prompt": None, "answer": "1"})
    with pytest.raises(DataError, match=r"^2 faults") as error:
        dataset(data_config(source(path), max_prompt_length=10))
    assert "row 1: the prompt has 20 tokens" in str(error.value)
    assert "row 2, field 'prompt': is null" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"task": "chain_sun"}, "no such task; did you mean 'chain_sum'"),
        (
            {"task": "chain_sum", "options": {"min_terms": 5, "max_terms": 2}},
            "field 'options': AssertionError: max_terms must be >= min_terms",
        ),
        ({"task": "chain_sum", "options": {"terms": 2}}, "unexpected keyword argument 'terms'"),
        ({"task": "chain_sum", "options": {"seed": 2}}, "seed: set next to 'task', not inside 'options'"),
    ],
)
def test_wrong_reasoning_gym_settings(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as error:
        check_files(data_config({"kind": "reasoning_gym", "size": 2, **settings}))
    assert expected in str(error.value)


# ---- order ------------------------------------------------------------------------------------------------------------------------


def ids(prompts: list[Any]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_each_epoch_is_a_seeded_permutation_and_carries_over_inside_a_batch(tmp_path: Path) -> None:
    config = data_config(source(numbered(tmp_path / "d.jsonl", 10)))
    drawn = ids(dataset(config).next_batch(25))
    for epoch in (0, 1):
        assert sorted(drawn[10 * epoch : 10 * epoch + 10]) == sorted(f"d/{n}#{epoch}" for n in range(1, 11))
    assert all(name.endswith("#2") for name in drawn[20:])
    orders = [[name.split("#")[0] for name in drawn[start : start + 10]] for start in (0, 10)]
    assert orders[0] != orders[1]
    again = dataset(config)
    assert ids([prompt for size in (7, 1, 17) for prompt in again.next_batch(size)]) == drawn
    assert ids(dataset(config, seed=1).next_batch(25)) != drawn


def test_without_shuffle_the_order_is_the_files(tmp_path: Path) -> None:
    config = data_config(source(numbered(tmp_path / "d.jsonl", 3)), shuffle=False)
    assert ids(dataset(config).next_batch(5)) == ["d/1#0", "d/2#0", "d/3#0", "d/1#1", "d/2#1"]


def test_size_takes_the_first_rows_and_reads_no_others(tmp_path: Path) -> None:
    file = numbered(tmp_path / "d.jsonl", 2)
    file.write_text(file.read_text() + "not JSON\n")
    assert ids(dataset(data_config(source(file, size=2), shuffle=False)).next_batch(3)) == ["d/1#0", "d/2#0", "d/1#1"]
    with pytest.raises(DataError, match="row 3"):
        check_files(data_config(source(file, size=3)))


def test_a_batch_larger_than_the_data_has_a_name_for_each_occurrence(tmp_path: Path) -> None:
    batch = dataset(data_config(source(numbered(tmp_path / "d.jsonl", 2)))).next_batch(9)
    assert len(set(ids(batch))) == 9
    assert sorted(Counter(prompt.text for prompt in batch).values()) == [4, 5]


def test_sources_are_mixed_by_weight_times_size(tmp_path: Path) -> None:
    small, large = numbered(tmp_path / "small.jsonl", 10), numbered(tmp_path / "large.jsonl", 30)
    even = dataset(data_config(source(small), source(large)))
    assert Counter(prompt.source for prompt in even.next_batch(40)) == {"small": 10, "large": 30}
    for _ in range(5):  # mixed evenly, not one after the other
        assert Counter(prompt.source for prompt in even.next_batch(4)) == {"small": 1, "large": 3}
    weighted = dataset(data_config(source(small, weight=3.0), source(large)))
    assert Counter(prompt.source for prompt in weighted.next_batch(60)) == {"small": 30, "large": 30}


def test_state_continues_the_order_and_refuses_other_data(tmp_path: Path) -> None:
    path, other = numbered(tmp_path / "a.jsonl", 5), numbered(tmp_path / "b.jsonl", 7)
    config = data_config(source(path), source(other, weight=2.0))
    first = dataset(config)
    first.next_batch(11)
    state = json.loads(json.dumps(first.state_dict()))
    expected = ids(first.next_batch(30))
    second = dataset(config)
    second.load_state_dict(state)
    assert ids(second.next_batch(30)) == expected
    with pytest.raises(DataError, match="seed was 0, is now 1"):
        dataset(config, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="the sources were a, b, are now a"):
        dataset(data_config(source(path))).load_state_dict(state)
    numbered(path, 4)
    with pytest.raises(DataError, match="the prompts of source 'a' have changed"):
        dataset(config).load_state_dict(state)


def test_samples_and_prompts_are_split_evenly_over_ranks() -> None:
    assert [list(r) for r in split_evenly(9, 4)] == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    assert [i for r in split_evenly(10, 4) for i in r] == list(range(10))
    assert [len(r) for r in split_evenly(2, 4)] == [1, 1, 0, 0]


def test_a_column_with_the_name_of_the_sample_seed_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "1", "sample_seed": 3}]
    with pytest.raises(DataError, match=r"row 2, field 'sample_seed': this name is reserved.*rename the column"):
        check_files(data_config(source(write_jsonl(tmp_path / "d.jsonl", *rows))))
