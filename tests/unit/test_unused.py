"""Nothing at the top level of a module of the package is there for tests alone.

A function, class or constant is used if another place of the package, the tools, the benchmarks or the examples reads it: by name, as an
attribute of its module, or by a reference in text ("package.module:name"). A decorator of the package registers what it decorates.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.torchrun import ROOT

PACKAGE = "vapo_mcore"
ENTRY_POINTS = {
    ("vapo_mcore.algorithm.losses", "policy_loss"),  # named by the algorithm's specification, as are the next two
    ("vapo_mcore.algorithm.losses", "value_loss"),
    ("vapo_mcore.algorithm.losses", "positive_nll"),
    ("vapo_mcore.experience.bad_batch", "load_bad_batch"),  # for users who look into a bad update: docs/troubleshooting.md
}
FROM_OUTSIDE = ("functools", "dataclass", "contextmanager", "numba", "torch", "cache", "lru_cache", "njit", "runtime_checkable")
"""Decorators that do not register what they decorate."""


def module_of(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module binds at its top level, other than by an import, with their statements."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {ast.unparse(decorator).split("(")[0].split(".")[0] for decorator in node.decorator_list}
            if names <= set(FROM_OUTSIDE):
                yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (inner.id, node)
                for target in targets
                for inner in ast.walk(target)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            )


def unused(root: Path, users: Iterable[Path]) -> list[str]:
    """Top-level names of the package in ``root`` that neither it nor ``users`` read, each with file and line."""
    own = {file: ast.parse(file.read_text()) for file in sorted((root / PACKAGE).rglob("*.py"))}
    trees = list(own.values()) + [ast.parse(file.read_text()) for file in users]
    imported: set[tuple[str, str]] = set()
    attributes: set[str] = set()
    texts: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                imported |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts |= set(re.findall(r"[:.]([A-Za-z_]\w*)", node.value)) | {node.value}
    mentioned = attributes | texts
    found = []
    for file, tree in own.items():
        module = module_of(file, root)
        read = {id(node): {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} for node in tree.body}
        for name, node in definitions(tree):
            if name.startswith("__") or (module, name) in ENTRY_POINTS or (module, name) in imported or name in mentioned:
                continue
            if not any(name in names for statement, names in read.items() if statement != id(node)):
                found.append(f"{file}:{node.lineno}: {name} is not used outside tests")
    return found


def test_everything_at_the_top_level_is_used_outside_tests() -> None:
    assert unused(ROOT, (file for folder in ("tools", "benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py")))) == []


def test_a_planted_function_is_found_and_a_used_one_is_not(tmp_path: Path) -> None:
    (tmp_path / PACKAGE).mkdir()
    planted = tmp_path / PACKAGE / "thing.py"
    planted.write_text("LIMIT = 3\n\n\ndef recursive(n):\n    return recursive(n - LIMIT)\n\n\ndef used():\n    return 1\n")
    tool = tmp_path / "tool.py"
    tool.write_text("from vapo_mcore.thing import used\n\nprint(used())\n")
    assert unused(tmp_path, [tool]) == [f"{planted}:4: recursive is not used outside tests"]
