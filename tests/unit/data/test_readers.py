"""Files as people have them: CSV, saved datasets, known schemas; and everything that can be wrong with a file or a row."""

import errno
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.torchrun import ROOT
from tests.unit.data.test_prompts import data_config, source, write_jsonl
from vapo_mcore.data import readers
from vapo_mcore.data.faults import Faults
from vapo_mcore.data.sources import Problem, read_source

DATASET = ROOT / "tests" / "cases" / "hf_dataset"  # written by datasets 5.2.0: a DatasetDict of train (3 rows) and test (1 row)


def read(path: Path, **settings: Any) -> tuple[list[Problem], list[str]]:
    """Problems of a file, and its faults."""
    faults = Faults(kept=None)
    config = data_config(source(path, **settings), chat_template=True)
    problems = read_source(config.train[0], config, faults)
    found = sorted(faults.found, key=lambda fault: fault.row or 0)  # readers run ahead of checks
    return problems, [str(fault).removeprefix(str(path)) for fault in found]


# ---- schemas ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "1+1", "answer": "2", "question": "other"}, "1+1", "2"),
        (
            {
                "data_source": "math_dapo",
                "prompt": [{"content": "1+1", "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4"},
            },
            [{"role": "user", "content": "1+1"}],
            "2",
        ),
        ({"question": "1+1", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}, "1+1", "2"),  # GSM8K
        (
            {"problem": "1+1", "solution": "so 2", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "test/1.json"},
            "1+1",
            "2",
        ),  # MATH-500
        (
            {"id": 60, "problem": "1+1", "solution": "so 2", "answer": "2", "url": "u", "year": "2024"},
            "1+1",
            "2",
        ),  # HuggingFaceH4/aime_2024
        ({"ID": "2024-I-1", "Problem": "1+1", "Solution": "so 2", "Answer": 2}, "1+1", "2"),  # Maxwell-Jia/AIME_2024
        ({"question": "1+1", "answer": "2"}, "1+1", "2"),  # opencompass/AIME2025
        ({"problem": "1+1", "expected_answer": "2"}, "1+1", "2"),
    ],
)
def test_known_schemas_need_no_mapping(tmp_path: Path, row: dict[str, Any], prompt: Any, answer: str) -> None:
    (problem,), faults = read(write_jsonl(tmp_path / "d.jsonl", row))
    assert (problem.prompt, problem.ground_truth, faults) == (prompt, answer, [])


def test_a_file_of_no_known_schema_names_its_columns_and_can_be_mapped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"question": "1+1", "problem": "1+1", "target": "2"})
    problems, faults = read(path)
    assert (problems, faults[0]) == ([], ", row 1, field 'prompt': missing; the row has problem, question, target")
    (problem,), faults = read(path, fields={"prompt": "problem", "answer": "target"})
    assert (problem.ground_truth, problem.metadata) == ("2", {"question": "1+1"})


def test_gsm8k_answers_are_cut_out_whether_mapped_or_not(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"question": "1+1", "answer": "so\n#### 2", "other": "3"})
    mapped = ({}, {"prompt": "question"}, {"prompt": "question", "answer": "answer"}, {"answer": "other"})
    assert [read(path, fields=fields)[0][0].ground_truth for fields in mapped] == ["2", "2", "2", "3"]


def test_a_bad_first_row_does_not_decide_the_schema(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", {"question": "?"}, {"question": "1+1", "answer": "#### 2"}, {"question": "2+2", "answer": "4"})
    problems, faults = read(path)
    assert [problem.ground_truth for problem in problems] == ["2"]
    assert faults == [
        ", row 1, field 'answer': missing; the row has question",
        ", row 3, field 'answer': has no '####' before the final answer, which GSM8K requires",
    ]


def test_verl_parquet(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": name,
            "prompt": [{"role": "user", "content": f"{n}+1"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
        }
        for n, name in enumerate(("aime", "math"))
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    problems, faults = read(tmp_path / "d.parquet", fields={"subsets": ["data_source"]})
    assert [(p.ground_truth, p.subsets) for p in problems] == [("1", {"data_source": "aime"}), ("2", {"data_source": "math"})]
    assert faults == []


def test_subsets_must_be_there_and_plain(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "answer": "1", **extra} for extra in ({"level": 3}, {}, {"level": [1]}, {"level": None})]
    problems, faults = read(write_jsonl(tmp_path / "d.jsonl", *rows), fields={"subsets": ["level"]})
    assert [problem.subsets for problem in problems] == [{"level": "3"}]
    assert [fault.split(": ")[1].split(";")[0] for fault in faults] == [
        "missing",
        "must be a text, a number or a boolean to split evaluations by, got a list",
        "is null",
    ]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_an_object_that_names_a_key_twice_is_a_bad_row(tmp_path: Path, ending: str) -> None:
    """JSON readers take the last of its values and say nothing."""
    rows = [
        '{"prompt": "1", "answer": "1"}',
        '{"prompt": "2", "answer": "2", "prompt": "3"}',
        '{"prompt": "4", "answer": "4", "m": [{"a": 1, "a": 1}]}',
    ]
    text = "\n".join(rows) if ending == "jsonl" else f"[{', '.join(rows)}]"
    (tmp_path / f"d.{ending}").write_text(text)
    problems, faults = read(tmp_path / f"d.{ending}")
    assert [problem.ground_truth for problem in problems] == ["1"]
    assert faults == [
        ", row 2: duplicate key 'prompt'; keep one of its values",
        ", row 3: duplicate key 'a'; keep one of its values",
    ]


# ---- CSV --------------------------------------------------------------------------------------------------------------------------


def test_csv_with_quotes_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,level\r\n"What is\n""1, 1""?",2,a\r\n\r\nß?,"3,5",\r\n'
    (tmp_path / "d.csv").write_bytes(text.encode())
    problems, faults = read(tmp_path / "d.csv")
    assert [(p.problem_id, p.prompt, p.ground_truth, p.metadata) for p in problems] == [
        ("d/1", 'What is\n"1, 1"?', "2", {"level": "a"}),
        ("d/2", "ß?", "3,5", {"level": None}),
    ]
    assert faults == []


def test_tsv(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text("question\tanswer\n1+1, or more\t2\n")
    assert [(p.prompt, p.ground_truth) for p in read(tmp_path / "d.tsv")[0]] == [("1+1, or more", "2")]


def test_every_bad_csv_row_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"prompt,answer\na,1\nb\nc,1,2\n,4\nd\xe9,5\ne,6\n")
    problems, faults = read(tmp_path / "d.csv")
    assert [problem.prompt for problem in problems] == ["a", "e"]
    assert faults == [
        ", row 2: line 3: has 1 values, the header has 2 columns",
        ", row 3: line 4: has 3 values, the header has 2 columns",
        ", row 4, field 'prompt': is null",
        ", row 5, field 'prompt': is not UTF-8: byte 0xe9 at character 1",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'prompt,answer\na,1\nb,"2', ", row 2: line 3: not valid CSV: unexpected end of data; the rest of the file is not read"),
        (b'prompt,answer\n"a"b,1\n', ", row 1: line 2: not valid CSV: ',' expected after '\"'; the rest of the file is not read"),
        (b"prompt,answer,prompt\na,1,b\n", ": the header repeats 'prompt': 'prompt', 'answer', 'prompt'"),
        (b"prompt,answer,\na,1,b\n", ": the header has a column without a name: 'prompt', 'answer', ''"),
        (b"pr\xffompt,answer\na,1\n", ": the header is not UTF-8: byte 0xff at character 2"),
        (b"", ": has no rows"),
        (b"prompt,answer\n", ": has no rows"),
        ("prompt,answer\na,1\n".encode("utf-16"), ": is UTF-16; save it as UTF-8"),
        ("prompt,answer\na,1\n".encode("utf-32"), ": is UTF-32; save it as UTF-8"),
    ],
)
def test_faults_of_a_csv_file(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "d.csv").write_bytes(content)
    assert expected in read(tmp_path / "d.csv")[1]


# ---- datasets on disk -------------------------------------------------------------------------------------------------------------


def test_a_dataset_saved_by_the_datasets_library() -> None:
    problems, faults = read(DATASET / "train")
    assert [(p.problem_id, p.prompt, p.ground_truth) for p in problems] == [
        ("train/1", "Half of 9?", "4.5"),
        ("train/2", "Ann has 2 apples and buys 3. How many?", "5"),
        ("train/3", "Twice 600?", "1,200"),
    ]
    assert faults == []


def test_of_several_splits_one_must_be_named(tmp_path: Path) -> None:
    assert read(DATASET)[1] == [f": holds 2 splits (test, train); give the folder of one: {DATASET / 'train'}"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "train").symlink_to(DATASET / "train")
    assert len(read(tmp_path)[0]) == 3


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("{", "state.json was not written by datasets' save_to_disk: not valid JSON"),
        (
            '{"_data_files": [{"filename": "../secret.arrow"}]}',
            "state.json was not written by datasets' save_to_disk: the dataset selects rows of other files",
        ),
        ('{"_data_files": [{"filename": "absent.arrow"}]}', "absent.arrow is not readable as Arrow"),
        ('{"_data_files": [{"filename": "broken.arrow"}]}', "broken.arrow is not readable as Arrow"),
        (None, "a folder must be written by datasets' save_to_disk (with state.json); give one of its files, part.parquet"),
    ],
)
def test_damaged_folders(tmp_path: Path, state: str | None, expected: str) -> None:
    (tmp_path / "broken.arrow").write_bytes((DATASET / "train" / "data-00000-of-00001.arrow").read_bytes()[:500])
    (tmp_path / "part.parquet").touch()
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    assert expected in read(tmp_path)[1][0]


# ---- encodings and sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_wrong_encodings(tmp_path: Path, name: str, encoding: str) -> None:
    row = '{"prompt": "ä", "answer": "1"}'
    text = {"d.jsonl": f"{row}\n", "d.json": f"[{row}]", "d.csv": "prompt,answer\nä,1\n"}[name]
    (tmp_path / name).write_bytes(text.encode(encoding))
    problems, faults = read(tmp_path / name)
    assert problems == []
    assert any("UTF-" in fault or "not valid JSON" in fault or "missing" in fault for fault in faults)


def test_a_huge_row_is_a_fault_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 1000)
    long = json.dumps({"prompt": "x" * 3000, "answer": "1"})
    exact = json.dumps({"prompt": "y" * 970, "answer": "1"})
    exact = exact.replace("y" * 970, "y" * (970 + 999 - len(exact)))
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "a", "answer": "1"}}\n{long}\n{exact}\n{long}')
    problems, faults = read(tmp_path / "d.jsonl")
    assert (len(exact), [problem.row for problem in problems]) == (999, [1, 3])
    assert faults == [
        f", row {row}: has {len(long) + end:,} bytes, more than 1,000; are the line ends missing?" for row, end in ((2, 1), (4, 0))
    ]
    (tmp_path / "d.csv").write_text("prompt,answer\na,1\n" + "x" * 3000 + ",1\n")
    assert read(tmp_path / "d.csv")[1] == [
        ", row 2: line 3: not valid CSV: field larger than field limit (1000); the rest of the file is not read"
    ]


def test_numbers_larger_than_floats_and_decimals_are_answers(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "x", "answer": %s}\n{"prompt": "y", "answer": 1e999}\n' % ("9" * 4000))
    problems, faults = read(tmp_path / "d.jsonl")
    assert [problem.ground_truth for problem in problems] == ["9" * 4000]
    assert faults == [", row 2, field 'answer': must be a text or a finite number, got a number: inf"]
    table = {"prompt": ["x", "y"], "answer": [Decimal("1.50"), Decimal("-20")]}
    pyarrow.parquet.write_table(pa.table(table), tmp_path / "d.parquet")
    problems, faults = read(tmp_path / "d.parquet")
    assert ([problem.ground_truth for problem in problems], faults) == (["1.50", "-20.00"], [])


def test_nul_characters_are_a_fault_of_their_row(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"prompt,answer\na\0b,1\nc,2\n")
    problems, faults = read(tmp_path / "d.csv")
    assert ([problem.prompt for problem in problems], faults) == (["c"], [", row 1, field 'prompt': has a NUL character at position 1"])
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "answer": "\\u0000"}\n')
    assert read(tmp_path / "d.jsonl")[1] == [", row 1, field 'answer': has a NUL character at position 0"]


def test_what_is_no_file_or_cannot_be_opened_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    assert read(tmp_path / "loop.jsonl")[1] == [": is not a file (a device, a pipe or a broken symbolic link)"]
    assert read(tmp_path / f"{'x' * 300}.jsonl")[1] == [": cannot be read: File name too long"]
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "x", "answer": 1})

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    assert read(path) == ([], [": cannot be read: Permission denied"])


# ---- ground truths ----------------------------------------------------------------------------------------------------------------


def test_lists_of_answers(tmp_path: Path) -> None:
    """One entry is the answer; several are refused, right each, or required all."""
    rows = [["34"], '["34"]', [7], ["5", "6"], '["5", "6"]', [], [["5"]], [None], [1, 1.5], "[1, 2]"]
    path = write_jsonl(tmp_path / "d.jsonl", *({"prompt": f"p{number}", "answer": answer} for number, answer in enumerate(rows)))
    problems, faults = read(path, verifier="math")
    assert [(problem.row, problem.ground_truth) for problem in problems] == [(1, "34"), (2, "34"), (3, "7"), (10, "[1, 2]")]
    assert [fault.split(": ", 1)[0] for fault in faults] == [
        *(f", row {row}, field 'answer'" for row in (4, 5, 6)), ", row 7, field 'answer[0]'", ", row 8, field 'answer[0]'",
        ", row 9, field 'answer'",
    ]  # fmt: skip
    assert "is a list of 2 answers; set answer_list: any" in faults[0] and "empty list" in faults[2] and "got a list" in faults[3]

    problems, _ = read(path, verifier="math", fields={"answer_list": "any"})
    found = {problem.row: (problem.ground_truth, problem.metadata.get("right_answers")) for problem in problems}
    assert found[4] == found[5] == ('["5", "6"]', ["5", "6"]) and found[9] == ('["1", "1.5"]', ["1", "1.5"])
    assert found[1] == ("34", None)

    problems, _ = read(path, verifier="math", fields={"answer_list": "all"})
    assert {problem.row: problem.ground_truth for problem in problems}[4] == "5, 6"
    assert read(path, verifier="exact", fields={"answer_list": "all"})[1][0].endswith("not for exact")
    assert {problem.row: problem.ground_truth for problem in read(path, verifier="exact")[0]}[2] == '["34"]'


def test_answers_that_are_all_required_must_be_told_apart(tmp_path: Path) -> None:
    answers = [["1, 2", "3"], ["(1, 2)", "$3$"], [r"\{1,2\}", "5"]]
    path = write_jsonl(tmp_path / "d.jsonl", *({"prompt": f"p{number}", "answer": answer} for number, answer in enumerate(answers)))
    problems, faults = read(path, verifier="math", fields={"answer_list": "all"})
    assert [problem.ground_truth for problem in problems] == ["(1, 2), 3", r"\{1,2\}, 5"]
    (fault,) = faults
    assert "answer_list: all cannot take '1, 2'" in fault


def test_columns_of_lists_in_parquet_and_leading_zeros(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"prompt": ["x", "y"], "answer": [["073"], ["3", "4"]]}), tmp_path / "d.parquet")
    problems, faults = read(tmp_path / "d.parquet", verifier="math", fields={"answer_list": "any"})
    assert ([problem.ground_truth for problem in problems], faults) == (["073", '["3", "4"]'], [])
    (tmp_path / "d.csv").write_text("prompt,answer\nx,073\n")
    assert [problem.ground_truth for problem in read(tmp_path / "d.csv")[0]] == ["073"]
