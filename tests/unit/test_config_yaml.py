"""YAML scalars are those of YAML 1.2, duplicates are refused, and what is written reads back the same."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vapo_mcore.config.yaml_text import format_yaml, parse_yaml, shown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("-.5", -0.5),
        ("17", 17),
        ("1_000", "1_000"),  # YAML 1.1's, as are the other readings of the next lines
        ("1_0.5", "1_0.5"),
        ("012", 12),
        ("-007", -7),
        ("0x1f", 31),
        ("0o17", 15),
        ("0b11", "0b11"),
        ("!!int '012'", 12),
        ("!!float 3", 3.0),
        ("-.INF", float("-inf")),
        ("null", None),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'12'", "12"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        (".inf", float("inf")),
    ],
)
def test_scalars(text: str, value: object) -> None:
    document, faults = parse_yaml(text)
    assert not faults
    assert document == value
    assert type(document) is type(value)


def test_all_duplicate_and_unnamed_keys_are_found() -> None:
    _, faults = parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 2\n3: x\noff: y\n")
    assert sorted(faults) == [
        "line 2: duplicate key 'c', already given in line 2",
        "line 3: duplicate key 'a', already given in line 1",
        "line 4: key '3' is not a string; quote it if it is meant as a name",
    ]


def test_merge_keys_work() -> None:
    assert parse_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\n") == ({"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}}, [])


_MALFORMED = ["a: [1", "a: b: c", "\tx: 1", "a: !!python/object/apply:os.system [ls]", "a: 1\n---\nb: 2\n", "x: \x01", "a: <<: 3"]
_WRONG_TAGS = [
    "a: !!timestamp x",
    "a: !!set {b}",
    "a: !!binary x",
    "a: !!int x",
    "a: !!int ''",
    "a: !!float ''",
    "a: !!bool x",
    "a: !!int 1_0",
    "a: !!int 1.5",
]
_ENDLESS = ["a: &x {b: *x}", "a: &x [[*x]]", "&x [*x]", "[" * 2000, "{a: " * 2000, "a: " + "9" * 5000]


@pytest.mark.parametrize("text", [*_MALFORMED, *_WRONG_TAGS, *_ENDLESS], ids=lambda text: text[:20])
def test_malformed_documents_are_refused(text: str) -> None:
    document, faults = parse_yaml(text)
    assert document is None
    assert len(faults) == 1
    assert faults[0].startswith("not valid YAML")
    assert "\n" not in faults[0]


def test_aliases_work_where_they_do_not_contain_themselves() -> None:
    assert parse_yaml("a: &x [1]\nb: [*x, *x]\nc: {d: *x}\n") == ({"a": [1], "b": [[1], [1]], "c": {"d": [1]}}, [])


def test_values_in_messages_are_written_as_in_yaml() -> None:
    assert shown({"a": (None, True, "b"), "c": 1.5}) == "{a: [null, true, 'b'], c: 1.5}"
    assert shown("x" * 300) == "'" + "x" * 196 + "..."


_TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029", exclude_categories=("Cc", "Cs")), max_size=12)
_WORDS = st.sampled_from(["off", "on", "yes", "1e-6", "0x10", "010", "null", "~", "", "1:30", "=", "<<", "2024-01-01", "-", "1_0", ".5"])
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT | _WORDS


@given(st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT | _WORDS, inner, max_size=3), max_leaves=8))
def test_what_is_written_reads_back_the_same(document: Any) -> None:
    text = format_yaml(document)
    assert parse_yaml(text) == (document, [])
    assert yaml.safe_load(text) == document or "e" in text  # other readers agree, but for YAML 1.1's floats without a dot
