"""``vapo-mcore data check``: counts known by hand, overlaps, deduplication, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_prompts import TOKENIZER, data_config, source, write_jsonl
from vapo_mcore.cli import main
from vapo_mcore.data.check import check_data, render
from vapo_mcore.data.prompts import PromptDataset, overlaps, prompt_key

TRAIN: list[Any] = [
    {"prompt": "What is 1+1?", "answer": 2, "level": "a"},
    {"prompt": "what  is\n1+1?", "answer": "2", "level": None},
    {"prompt": "WHAT IS 1+1?", "answer": "3"},
    {"prompt": "Another", "answer": "4"},
    {"prompt": None, "answer": "5"},
    7,
]
EVAL: list[Any] = [{"prompt": "another", "answer": "4"}, {"prompt": "New", "answer": "5"}, {"prompt": "New ", "answer": "5"}]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_jsonl(tmp_path / "train.jsonl", *TRAIN), write_jsonl(tmp_path / "held_out.jsonl", *EVAL)


def test_the_report_counts_what_is_there(files: tuple[Path, Path]) -> None:
    config = data_config(source(files[0]), eval=[source(files[1])], max_prompt_length=11)
    report = check_data(config, TOKENIZER)
    train, held_out = report.train[0], report.eval[0]
    assert (train.rows, train.usable, train.answers, train.overlong) == (6, 1, 1, 3)
    assert [(fault.row, fault.field) for fault in train.faults] == [(1, None), (2, None), (3, None), (5, "prompt"), (6, None)]
    assert train.faults[0].reason.startswith("the prompt has 12 tokens, more than data.max_prompt_length = 11")
    dropping = check_data(config.model_copy(update={"overlong_prompts": "drop"}), TOKENIZER)
    assert [(fault.row, fault.field) for fault in dropping.train[0].faults] == [(5, "prompt"), (6, None)]
    assert (dropping.train[0].overlong, dropping.train[0].overlong_rows) == (3, [(1, 12), (2, 13), (3, 12)])
    assert "prompts of more than 11 tokens: 3 (row 1: 12, row 2: 13, row 3: 12)" in render(dropping, 11, None)
    report = check_data(config.model_copy(update={"max_prompt_length": 100}), TOKENIZER)
    train, held_out = report.train[0], report.eval[0]
    assert (train.rows, train.usable, train.answers, train.overlong) == (6, 4, 3, 0)
    assert (train.repeated, train.contradicting, train.repeated_rows) == (2, 1, [(2, 1), (3, 1)])
    assert train.fields == {
        "prompt": {"text": 4, "null": 1},
        "answer": {"text": 4, "number": 1},
        "level": {"text": 1, "null": 1},
    }
    assert train.characters is not None and train.tokens is not None
    assert (train.characters.max, train.tokens.max, train.characters.median) == (13, 13, 12.0)
    assert (held_out.rows, held_out.usable, held_out.repeated, held_out.contradicting) == (3, 3, 1, 0)
    (overlap,) = report.overlaps
    assert (overlap.common, overlap.prompts, overlap.rows) == (1, 2, [(1, 4)])


def test_the_command_shows_it_and_tells_by_its_exit_code(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", str(files[0]), "--eval", str(files[1]), "--json", str(tmp_path / "report.json")]) == 1
    out = capsys.readouterr().out
    for expected in (
        "train.jsonl: 6 rows, 4 usable",
        "columns read as prompt and answer: prompt = prompt, answer = answer",
        "row 5, field 'prompt': is null",
        "row 6: a row must be an object with named fields, got a number: 7",
        "prompts that repeat an earlier one: 2, 1 of them with a different answer (rows 2 = 1, 3 = 1)",
        "overlap: 1 of the 2 distinct prompts of the evaluation set 'eval-1' are in the training source 'file-1' (rows 1 = 4)",
        "9 rows, 2 faults",
    ):
        assert expected in out
    assert json.loads((tmp_path / "report.json").read_text())["train"][0]["usable"] == 4
    assert main(["data", "check", str(files[1])]) == 0
    assert "3 rows, 0 faults" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "absent.jsonl")]) == 1
    assert "file: no such file" in capsys.readouterr().out


def test_of_many_faults_the_first_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", *({"prompt": "", "answer": 1} for _ in range(60)))
    assert main(["data", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert (out.count("is empty"), "... and 10 more faults (--all shows them)" in out) == (50, True)
    assert main(["data", "check", str(path), "--all"]) == 1
    assert capsys.readouterr().out.count("is empty") == 60


def test_columns_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"task": {"text": "1+1"}, "label": "2"})
    assert main(["data", "check", str(path), "--prompt", "task.text", "--answer", "label"]) == 0
    assert "prompt = task.text, answer = label" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x.jsonl", "--max-prompt-length", "0"], "must be at least 1"),
        (["x.jsonl", "--max-prompt-length", "9"], "also give --tokenizer"),
        (["x.yaml", "--prompt", "a", "--eval", "b"], "--eval, --prompt: not allowed with a configuration"),
        (["x.jsonl", "--json", "/dev/null/x"], "cannot be written"),
        (["x.jsonl", "--tokenizer", "nowhere"], "the tokenizer of 'nowhere' cannot be loaded"),
    ],
)
def test_wrong_usage(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_configuration_with_settings(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.unit.config_helpers import write_base

    (tmp_path / "run").mkdir()
    config = write_base(tmp_path / "run")
    (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")  # a missing model leaves out the tokens
    settings = [f"data.train.0.path={files[0]}", f"data.eval=[{{kind: file, path: {files[1]}, verifier: math}}]"]
    assert main(["data", "check", str(config), *settings]) == 1
    out = capsys.readouterr().out
    assert "train 'train'" in out
    assert "eval 'held_out'" in out
    assert "tokens" not in out


# ---- in a run ---------------------------------------------------------------------------------------------------------------------


def test_repeated_training_prompts_are_dropped_and_counted_on_request(tmp_path: Path) -> None:
    one, two = write_jsonl(tmp_path / "one.jsonl", *TRAIN[:4]), write_jsonl(tmp_path / "two.jsonl", *EVAL)
    for wanted, names in ((False, 7), (True, 3)):
        config = data_config(source(one), source(two), deduplicate=wanted)
        dataset = PromptDataset(config, "train", TOKENIZER, seed=0)
        assert len(dataset) == names
    assert [item.prompt_id for item in dataset.items] == ["one/1", "one/4", "two/2"]
    assert dataset.summary == (
        "data.train: 3 prompts: one 2 (2 dropped, repeat an earlier prompt), two 1 (2 dropped, repeat an earlier prompt)"
    )
    held_out = PromptDataset(data_config(source(one), eval=[source(two)], deduplicate=True), "eval", TOKENIZER, seed=0)
    assert len(held_out) == 3  # evaluation sets keep what they have


def test_overlap_of_a_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "clean.jsonl", *TRAIN[:4])
    config = data_config(source(train), eval=[source(files[1])])
    sets = [PromptDataset(config, split, TOKENIZER, seed=0) for split in ("train", "eval")]
    assert overlaps(*sets) == ["1 of the 2 distinct prompts of the evaluation set 'held_out' are in the training source 'clean'"]


def test_messages_and_text_are_compared_by_what_the_user_says() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
    assert prompt_key("1+1?") == prompt_key([user]) == prompt_key([system, user]) != prompt_key([user, user])


def test_ground_truths_that_the_verifier_cannot_read_are_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["073", "$5$", r"\$12", "12 cm", "12 ways", r"\frac{1}{", "?", ["3", "4"], ["3", "?"]]
    path = write_jsonl(tmp_path / "d.jsonl", *({"prompt": f"p{number}", "answer": answer} for number, answer in enumerate(answers)))
    assert main(["data", "check", str(path), "--verifier", "math", "--answer-list", "any"]) == 1
    shown = capsys.readouterr().out
    assert "9 rows, 6 usable" in shown
    for row in (6, 7, 9):
        assert f"row {row}: ground truth " in shown
    assert shown.count("cannot be read as mathematics") == 3
    assert main(["data", "check", str(path), "--answer-list", "any"]) == 0  # exact takes any text
    assert main(["data", "check", str(path), "--verifier", "maths"]) == 2
    assert "did you mean 'math'?" in capsys.readouterr().err
