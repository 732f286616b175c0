"""The commands in the documentation: the real parsers take them as written, what they name is there, and tests run each of them."""

import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from vapo_mcore.cli import _parse
from vapo_mcore.config import load_config

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "slurm/README.md")),
]
PROGRAMS = ("vapo-mcore", "python", "make", "torchrun", "sbatch", "pip", "slurm/chain.sh")
NOT_OURS = ("docker", "enroot", "export", "git", "cd", "source", ".", "srun", "scontrol")
"""Commands of other programs, which only those can check."""
PLACEHOLDERS = {"FILE": "quickstart.yaml", "CONFIG": "quickstart.yaml", "RECIPE.yaml": "quickstart.yaml", "CLUSTER.yaml": "cluster.yaml"}
PLACEHOLDERS |= {"FOLDER": "folder", "RUN": "run", "STEP": "1", "KEY=VALUE": "seed=1", "key.path=value": "seed=1", "slurm|local": "local"}

RUN_BY = {
    "config": ("tests/unit/test_cli.py", '"config"'),
    "data": ("tests/unit/data/test_check.py", '"data", "check"'),
    "train": ("tests/integration/test_train_cli.py", '"train"'),
    "watch": ("tests/unit/watch/test_watch.py", '"watch"'),
    "replay-step": ("tests/integration/test_replay_step.py", '"replay-step"'),
    "report": ("tests/integration/test_report.py", '"report"'),
    "eval": ("tests/integration/test_eval.py", '"eval"'),
    "plan": ("tests/distributed/test_planning.py", '"plan"'),
    "launch": ("tests/integration/test_launch_local.py", '"launch"'),
    "doctor": ("tests/unit/doctor/test_doctor.py", '"doctor"'),
    "convert": ("tests/unit/weights/test_convert.py", '"hf-to-megatron"'),
    "tools/ablation.py": ("tests/unit/tools/test_ablation.py", "ablation"),
    "tools/convert_checkpoint.py": ("tests/distributed/weights/test_weights.py", '"convert_checkpoint.py"'),
    "tools/diagnose.py": ("tests/unit/tools/test_diagnose.py", "diagnose"),
    "tools/fetch_smollm2.py": ("tests/unit/tools/test_fetch_smollm2.py", "fetch_smollm2"),
    "tools/make_tiny_model.py": ("tests/integration/test_make_tiny_model.py", "make_tiny_model"),
    "tools/plot_run.py": ("tests/unit/tools/test_plot_run.py", "plot_run"),
}
"""Which test runs a command, and by what it can be seen there."""


def commands_in(page: Path) -> list[str]:
    """Command lines of the fenced blocks that are no code of another language, joined at backslashes, without remarks."""
    blocks = re.findall(r"^```(?:|sh|bash|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.removeprefix("$ ").strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"\s+#.*", "", line) for line in lines]
    return [line for line in found if any(re.match(rf"(?:[A-Z_]+=\S+ )*{re.escape(name)} ", line) for name in PROGRAMS)]


COMMANDS = [(page, command) for page in PAGES for command in commands_in(page)]


def spelt_out(command: str) -> list[list[str]]:
    """The words of a command, or of each that a synopsis stands for: with its options in brackets, of alternatives each one."""
    command = re.sub(r"(?<=\s)\[([^\]]*)\]", lambda option: "" if "..." in option[1] or option[1].isupper() else option[1], command)
    head, *others = command.replace(" ...", "").split(" | ")
    words = shlex.split(head)
    while words and re.match(r"[A-Z_]+=", words[0]):  # the environment of the command
        words = words[1:]
    variants = [words, *([*words[:-1], *shlex.split(other)] for other in others)]
    return [[PLACEHOLDERS.get(word, word) for word in variant] for variant in variants]


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
    assert options.command in RUN_BY


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
    assert not script.startswith("tools/") or script in RUN_BY
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


@pytest.mark.parametrize("command", sorted({command for _, command in COMMANDS}))
def test_a_command_is_as_the_documentation_says(command: str) -> None:
    for words in spelt_out(command):
        check(words)


@pytest.mark.parametrize("command", RUN_BY)
def test_a_test_runs_each_command(command: str) -> None:
    where, sign = RUN_BY[command]
    assert sign in text_of(where), f"{where} does not run {command}"


def test_the_commands_are_found() -> None:
    """Every subcommand is documented somewhere, and so are the tools."""
    words = [words for _, command in COMMANDS for words in spelt_out(command)]
    assert {w[1] for w in words if w[0] == "vapo-mcore"} == {name for name in RUN_BY if not name.startswith("tools/")}
    assert len(COMMANDS) > 50
    tools = {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")} - {"tools/toolkit.py", "tools/addition_task.py"}
    assert tools == {name for name in RUN_BY if name.startswith("tools/")}


def test_blocks_hold_no_other_commands() -> None:
    """A line that begins like a command of a program of ours is checked; this one keeps a new program from being overlooked."""
    pattern = re.compile(r"^(?:\$ )?([a-z][\w./-]*) .*(?: --\w|\.ya?ml\b)")
    unknown = set()
    for page in PAGES:
        for block in re.findall(r"^```(?:|sh|bash|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            unknown |= {(page.name, found[1]) for line in block.splitlines() if (found := pattern.match(line))}
    assert {entry for entry in unknown if entry[1] not in (*PROGRAMS, *NOT_OURS)} == set()


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
