"""References to a user's code: what they may look like, and what is said when the code cannot be used."""

import sys

import pytest

from vapo_mcore.config.references import is_reference, reference_fault
from vapo_mcore.errors import ConfigError
from vapo_mcore.extensions.loading import load_function
from vapo_mcore.extensions.signature import read_signature, signature_faults


def write(tmp_path, text: str, name: str = "mine.py") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


@pytest.mark.parametrize("text", ["a:b", "a.b_c.d:e", "x.py:f", "/abs/dir with space/x.py:f", "../up/x.py:f"])
def test_references(text):
    assert is_reference(text) and reference_fault(text) is None


@pytest.mark.parametrize("text", ["", "a", "a.b", "x.py", "x.py:", ":f", ".py:f", "dir/.py:f", "a:b:c", "a..b:c", "x.py:f()", "x.py:1f"])
def test_what_is_no_reference(text):
    assert "package.module:name" in reference_fault(text)


def test_a_file_is_imported_once_whatever_it_is_called_by(tmp_path, monkeypatch):
    write(tmp_path, "CALLS = []\ndef f():\n    CALLS.append(1)\n    return len(CALLS)\n")
    monkeypatch.chdir(tmp_path)
    first, second = load_function("mine.py:f"), load_function(f"{tmp_path}/./mine.py:f")
    assert first is second and (first(), second()) == (1, 2)


def test_files_of_one_name_do_not_meet(tmp_path):
    found = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        found.append(load_function(write(tmp_path / folder, f"def f():\n    return {folder!r}\n") + ":f")())
    assert found == ["one", "two"]


def test_a_module_on_the_path():
    assert load_function("tests.integration.grading:divisible_by_three").__name__ == "divisible_by_three"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1\n\nimport no_such_thing\n", "f", r"cannot be imported: ModuleNotFoundError: .*no_such_thing.* \(.*mine.py, line 3\)"),
        ("def f(:\n", "f", r"cannot be imported: SyntaxError"),
        ("def g():\n    pass\nfrom math import pi\n", "f", r"has no function 'f'; it defines g$"),
        ("f = 3\n", "f", r"mine.py:f is int, not a function"),
    ],
)
def test_faults_of_a_file(tmp_path, text, name, message):
    path = write(tmp_path, text)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ConfigError, match=message):
            load_function(f"{path}:{name}")
    assert text.startswith(("def g", "f =")) or not any(getattr(module, "__file__", None) == path for module in list(sys.modules.values()))


def test_no_such_file_or_module(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file: .*absent.py"):
        load_function(f"{tmp_path}/absent.py:f")
    with pytest.raises(ConfigError, match=r"no_such_package.x cannot be imported: ModuleNotFoundError"):
        load_function("no_such_package.x:f")


def term(logprobs, advantages, *, power=2.0, floor):
    return logprobs


def test_parameters_say_what_is_read():
    signature = read_signature(term)
    assert (signature.inputs, signature.options, signature.required) == (("logprobs", "advantages"), ("power", "floor"), ("floor",))
    assert signature_faults(term, ("logprobs", "advantages"), {"floor": 1}, {}) == []


def test_faults_between_parameters_and_what_there_is():
    faults = signature_faults(term, ("logprobs", "advantage"), {"powr": 1}, {})
    assert faults == [
        "asks for 'advantages', which does not exist; did you mean 'advantage'? (inputs: logprobs, advantage; options are keyword-only)",
        "has no option 'powr': its options are power, floor",
        "needs the option 'floor'",
    ]
    faults = signature_faults(term, ("logprobs",), {"floor": 1}, {"advantages": "which needs a moon"})
    assert faults == ["asks for 'advantages', which needs a moon"]
    assert signature_faults(lambda *everything: 0, (), {}, {}) == ["must name each input and option: *everything accepts any"]
