"""The rooms of the package and who may use whom: imports point downwards, everywhere, lazy imports included.

``LAYERS`` is the one table, from the bottom up. A room imports rooms of lower layers and nothing else of the package. Inside a room, no
module imports itself through another. Imports under ``if TYPE_CHECKING`` count between rooms, and not inside one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "vapo_mcore"
ROOT = Path(__file__).parents[2] / PACKAGE

LAYERS = (
    ("__init__", "errors"),
    ("collectives", "heartbeat", "interrupts", "metrics_file"),
    ("checkpoint_files",),
    ("algorithm", "config"),
    ("diagnosis", "environments", "evaluation", "extensions", "launch", "records"),
    ("data",),
    ("report", "rewards", "rollout", "watch"),
    ("megatron",),
    ("weights",),
    ("checkpoint", "planning"),
    ("doctor", "experience"),
    ("trainer",),
    ("commands",),
    ("certify",),
    ("cli",),
    ("__main__",),
)


def modules(root: Path) -> dict[str, Path]:
    """Dotted names below the package, and their files."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = file
    return found


def imports(file: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int, bool]]:
    """Module imported, line, and whether for type checkers alone."""
    tree = ast.parse(file.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != PACKAGE:
                continue
            inside = name.split(".")[1:]
            while inside and ".".join(inside) not in known:
                inside.pop()  # a name in a module
            yield ".".join(inside) or "__init__", node.lineno, id(node) in typing


def violations(root: Path) -> list[str]:
    """Imports that do not point downwards, each with file and line."""
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    found = []
    known = modules(ROOT) | modules(root)
    for name, file in modules(root).items():
        room = name.split(".")[0]
        if room not in level:
            found.append(f"{file}: the room {room!r} is in no layer of the table")
            continue
        for target, line, _ in imports(file, known):
            other = target.split(".")[0]
            if other != room and level.get(other, len(LAYERS)) >= level[room]:
                found.append(f"{file}:{line}: {room} must not import {other} ({target})")
    return found


def circle(root: Path) -> list[str]:
    """The modules of an import circle inside one room, or nothing."""
    known = modules(root)
    graph = {name: {target for target, _, typing in imports(file, known) if not typing} - {name} for name, file in known.items()}
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for target in sorted(graph.get(name, ())):
            found = visit(target, [*path, name])
            if found:
                return found
        finished.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


def test_every_room_imports_lower_rooms_only() -> None:
    assert violations(ROOT) == []


def test_no_module_imports_itself_through_others() -> None:
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("checkpoint/saver.py", "import os\n\nfrom vapo_mcore.trainer.step import StepRunner\n", 3),
        ("config/rules.py", "def lazy():\n    from vapo_mcore.checkpoint import resume\n", 2),
        ("algorithm/losses.py", "import vapo_mcore.config.schema\n", 1),
        ("data/prompts.py", "from vapo_mcore.rewards import pool\n", 1),
        ("novelty/thing.py", "", None),
    ],
)
def test_a_planted_import_is_found_with_file_and_line(tmp_path: Path, file: str, text: str, line: int | None) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{planted}:" if line is None else f"{planted}:{line}:")


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/a.py").write_text("from vapo_mcore.config import b\n")
    (tmp_path / "config/b.py").write_text("from vapo_mcore.config.c import x\n")
    (tmp_path / "config/c.py").write_text("def lazy():\n    from vapo_mcore.config.a import y\n")
    assert circle(tmp_path) == ["config.a", "config.b", "config.c", "config.a"]
