"""The commands that the pages tell a reader to run: lines of fenced blocks, and code within the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.torchrun import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "slurm/README.md")),
]
PROGRAMS = ("vapo-mcore", "python", "python3", "make", "torchrun", "sbatch", "pip", "slurm/chain.sh", "docker", "enroot")
SHELL = ("export", ".")
"""What changes the shell for the commands after it in its block, each of which it is one command with."""
OTHERS = {
    "python -m verl.trainer.main_ppo key=value ...": "verl's",
    "sbatch --test-only": "what launch runs",
    "python -m vapo_mcore.launch.node": "what launch and slurm/vapo.sbatch run",
}
"""Code within the text that no reader is told to run."""

PLACEHOLDERS = {"FILE": "quickstart.yaml", "CONFIG": "quickstart.yaml", "RECIPE.yaml": "quickstart.yaml", "CLUSTER.yaml": "cluster.yaml"}
PLACEHOLDERS |= {"FOLDER": "folder", "RUN": "run", "STEP": "1", "OUT": "out", "KEY=VALUE": "seed=1", "key.path=value": "seed=1"}
PLACEHOLDERS |= {"key=value": "seed=1", "slurm|local": "local"}


def fenced_blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Language and lines of each fenced block."""
    language: str | None = None
    lines: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line.strip().removeprefix("```"), []
        else:
            yield language, lines
            language = None
    assert language is None, f"{page.name}: a fenced block without an end"


def command_blocks(page: Path) -> list[list[str]]:
    """Lines of the blocks that are no code of another language, joined at backslashes; of recorded sessions the commands."""
    return [
        "\n".join(line for line in lines if language != "console" or line.startswith("$ ")).replace("\\\n", " ").splitlines()
        for language, lines in fenced_blocks(page)
        if language in ("", "sh", "bash", "shell", "console")
    ]


def commands_in(page: Path) -> list[str]:
    """Commands of the fenced blocks without remarks, each with the lines before it that change its shell."""
    found = []
    for lines in command_blocks(page):
        before: list[str] = []
        for line in lines:
            command = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
            if _starts_with(command, SHELL):
                before.append(command)
            elif _starts_with(command, PROGRAMS):
                found.append("\n".join([*before, command]))
        assert not before or found[-1].startswith(before[0]), f"{page.name}: nothing follows {before}"
    return found


def inline_commands_in(page: Path) -> list[str]:
    """Code within the text that begins like a command and has an argument."""
    text, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        inside ^= line.lstrip().startswith("```")
        text.append("" if inside else line)
    spans = [span for part in "\n".join(text).split("\n\n") for _, span in re.findall(r"(`+)(.+?)\1(?!`)", part, re.S)]
    spans = [part for span in spans for part in " ".join(span.split()).split(" && ")]
    return [span for span in spans if _starts_with(span, (*PROGRAMS, ".")) and span not in OTHERS]


def _starts_with(command: str, programs: tuple[str, ...]) -> bool:
    return any(re.match(rf"(?:[A-Z_]+=\S+ )*{re.escape(name)} ", command) for name in programs)


def words_of(command: str) -> list[str]:
    """The words of a command's last line, without its environment and redirections."""
    words = shlex.split(command.splitlines()[-1])
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def identity(words: list[str]) -> tuple[str, ...]:
    """What is run, whatever its arguments: program and subcommand, script or target."""
    program, *rest = words
    if program == "vapo-mcore":
        return (program, *rest[: 2 if rest[0] in ("data", "convert") else 1])
    if program == "python" and rest[0] == "tools/convert_checkpoint.py":  # the same command by another name
        return ("vapo-mcore", "convert", *rest[1:2])
    if program in ("python", "python3"):
        return (program, *rest[: 2 if rest[0] in ("-m", "-c") else 1])
    if program == "torchrun":
        if "-m" in rest:
            return (program, *rest[rest.index("-m") :][:3])
        return (program, *(word for word in rest if word.endswith(".py")))
    if program == "sbatch":
        script = next(index for index, word in enumerate(rest) if word.endswith(".sbatch"))
        return (program, *rest[script : script + 2])
    return (program,) if program in ("slurm/chain.sh", ".") else (program, rest[0])


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def spelt_out(command: str) -> list[list[str]]:
    """The words of a command, or of each that a synopsis stands for: with its options in brackets, of alternatives each one."""
    command = re.sub(r"(?<=\s)\[([^\]]*)\]", lambda option: "" if "..." in option[1] or option[1].isupper() else option[1], command)
    head, *others = command.replace(" ...", "").split(" | ")
    words = words_of(head)
    variants = [words, *([*words[:-1], *shlex.split(other)] for other in others)]
    return [[PLACEHOLDERS.get(word, word) for word in variant] for variant in variants]


def is_synopsis(command: str) -> bool:
    """Whether it shows the form of a command and cannot be run as it stands."""
    return any(word in PLACEHOLDERS for word in re.split(r"[\s\[\]]+", command)) or " | " in command or "..." in command
