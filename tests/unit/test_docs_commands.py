"""The commands in the documentation: the real parsers take them as written, what they name is there, and tests/docs runs each of them."""

import ast
import re
import tomllib
from functools import cache

import pytest

from tests.docs.command import Command
from tests.docs.pages import (
    OTHERS,
    PAGES,
    PROGRAMS,
    SHELL,
    command_blocks,
    commands_in,
    fenced_blocks,
    identity,
    inline_commands_in,
    is_synopsis,
    options,
    spelt_out,
    words_of,
)
from tests.docs.sessions import SESSIONS
from tests.docs.table import COMMANDS
from tests.torchrun import ROOT
from vapo_mcore.cli import _parse
from vapo_mcore.config import load_config
from vapo_mcore.errors import ConfigError

NOT_OURS = ("git", "cd", "source", "srun", "scontrol")
"""Commands of other programs that a block may hold."""
FENCED = [(page, command) for page in PAGES for command in commands_in(page)]
INLINE = [(page, command) for page in PAGES for command in inline_commands_in(page)]
TABLE = {command.written for command in COMMANDS}
REFUSED = {command.written: SESSIONS[command.written] for command in COMMANDS if command.codes == (2,)}
"""Mistakes that a page shows, and the recorded messages."""


def check_arguments(arguments: list[str]) -> None:
    """The parser takes them, recipes are there and can be loaded with their settings."""
    if arguments[0] == "convert" and len(arguments) == 2:  # a synopsis of the actions
        arguments = [*arguments, "a"] + (["b"] if arguments[1] in ("hf-to-megatron", "megatron-to-hf") else [])
    options = _parse(arguments)
    assert options.command == arguments[0]
    missing = [
        word for word in arguments if word.startswith(("examples/", "slurm/", "docs/", "benchmarks/")) and not (ROOT / word).exists()
    ]
    assert missing == []
    file = getattr(options, "file", None)
    if file is not None and file.startswith("examples/"):
        load_config(ROOT / file, options.overrides, check_paths=False)


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def options_of(script: str) -> set[str]:
    """Option names that a script or what it imports of its folder gives to argparse."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text_of(script))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def check_script(words: list[str]) -> None:
    script, *arguments = words
    assert (ROOT / script).is_file()
    if script == "tools/convert_checkpoint.py":
        return check_arguments(["convert", *arguments])
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert given <= options_of(script), given - options_of(script)
    return None


def check(words: list[str]) -> None:
    program, *rest = words
    if program == "vapo-mcore":
        check_arguments(rest)
    elif program == "python" and rest[0] == "-m":
        assert (ROOT / f"{rest[1].replace('.', '/')}.py").is_file(), rest[1]
    elif program == "python" and rest[0] != "-c":
        check_script(rest)
    elif program == "torchrun":
        check_arguments(rest[rest.index("vapo_mcore.cli") + 1 :])
    elif program == "make":
        assert re.search(rf"^{re.escape(rest[0])}:", text_of("Makefile"), re.M), rest[0]
    elif program == "sbatch":
        script = next(word for word in rest if word.endswith(".sbatch"))
        assert (ROOT / script).is_file()
        check_arguments(rest[rest.index(script) + 1 :])
    elif program == "pip":
        extras = {name for word in rest for found in re.findall(r"^\.\[(.*)\]$", word) for name in found.split(",")}
        assert extras <= tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("command", sorted({command for _, command in FENCED}))
def test_a_command_is_as_the_documentation_says(command: str) -> None:
    for words in spelt_out(command):
        try:
            check(words)
        except ConfigError as error:
            assert command in REFUSED
            assert str(error).splitlines()[1:] == REFUSED[command][1:]  # the first line has the path as given


def shown_by_another(command: str) -> bool:
    """Whether tests/docs runs all that a synopsis, or a command that is merely named, stands for: the same with at least its options."""
    run = [(identity(words_of(other.script)), options(words_of(other.script))) for other in COMMANDS if not other.cannot]
    return all(
        any(what[: len(identity(words))] == identity(words) and options(words) <= given for what, given in run)
        for words in spelt_out(command)
    )


@pytest.mark.parametrize(("page", "command"), FENCED, ids=lambda value: getattr(value, "name", None))
def test_tests_docs_runs_it(page: object, command: str) -> None:
    assert command in TABLE or (is_synopsis(command) and shown_by_another(command)), "tests/docs/table.py does not have it"


@pytest.mark.parametrize(("page", "command"), INLINE, ids=lambda value: getattr(value, "name", None))
def test_tests_docs_runs_what_the_text_names(page: object, command: str) -> None:
    assert command in TABLE or shown_by_another(command), "tests/docs/table.py does not have it"


def test_the_table_has_nothing_else() -> None:
    written = [command.written for command in COMMANDS]
    assert len(written) == len(TABLE)
    assert TABLE - {command for _, command in FENCED + INLINE} == set()
    assert [command.written.split()[0] for command in COMMANDS if command.cannot] == ["docker", "enroot"]
    spans = {span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))}
    assert set(OTHERS) <= spans


@pytest.mark.parametrize(
    "change",
    [
        {"swap": {"train": "eval"}, "why": "x"},
        {"swap": {"--resume": ""}, "why": "x"},
        {"swap": {"nothing": "else"}, "why": "x"},
        {"add": "seed=1"},
        {"add": "|| true", "why": "x"},
    ],
)
def test_a_replacement_that_changes_the_command_is_refused(change: dict) -> None:
    Command("vapo-mcore train x.yaml --resume", {"x.yaml": "y.yaml"}, add="seed=1", why="x")
    with pytest.raises(AssertionError):
        Command("vapo-mcore train x.yaml --resume", **change)


def test_the_tutorial_shows_the_files_that_it_runs() -> None:
    shown = {
        language: "\n".join(lines) for language, lines in fenced_blocks(ROOT / "docs" / "tutorial.md") if language in ("python", "yaml")
    }
    assert shown["python"] in text_of("examples/tutorial/reward.py")
    recipe = text_of("examples/tutorial/recipe.yaml")
    assert shown["yaml"] in recipe and recipe.endswith(shown["yaml"] + "\n")


def test_every_subcommand_and_tool_is_documented() -> None:
    words = [words for _, command in FENCED + INLINE for words in spelt_out(command)]
    subcommands = re.findall(r'add_parser\(\s*"([\w-]+)"', text_of("vapo_mcore/cli.py"))
    assert {w[1] for w in words if w[0] == "vapo-mcore"} == set(subcommands)
    assert len(FENCED) > 60
    tools = {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} - {"tools/toolkit.py", "tools/addition_task.py"}
    by_make = {"tools/make_tiny_model.py": "--output models/tiny", "tools/setup_environment.py": "--venv $(VENV)"}
    by_make["tools/setup_gpu.py"] = "--venv $(VENV) $(SETUP_OPTIONS)"
    assert tools == set(by_make) | {w[1] for w in words if w[0] == "python" and w[1].startswith("tools/")}
    assert all(f"{name} {options}" in text_of("Makefile") for name, options in by_make.items())


def test_blocks_hold_no_other_commands() -> None:
    """A line that begins like a command of a program of ours is run; this one keeps a new program from being overlooked."""
    pattern = re.compile(r"^(?:\$ )?([a-z][\w./-]*) .*(?: --\w|\.ya?ml\b)")
    lines = {(page.name, line) for page in PAGES for block in command_blocks(page) for line in block}
    unknown = {(name, found[1]) for name, line in lines if (found := pattern.match(line))}
    assert {entry for entry in unknown if entry[1] not in (*PROGRAMS, *SHELL, *NOT_OURS)} == set()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vapo-mcore watch RUN --onec", SystemExit),
        ("vapo-mcore train examples/configs/nothing.yaml", AssertionError),
        ("python tools/plot_run.py runs/x --outptu y", AssertionError),
        ("make everything", AssertionError),
        ('pip install --editable ".[nothing]"', AssertionError),
    ],
)
def test_a_wrong_command_is_found(command: str, expected: type[BaseException]) -> None:
    (words,) = spelt_out(command)
    with pytest.raises(expected):
        check(words)
