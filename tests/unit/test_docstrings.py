"""What ruff does not find in docstrings: a section that stands twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vapo_mcore"
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)


def repeated_sections(text: str) -> Iterator[tuple[int, str]]:
    """Line of the definition and name of each section that its docstring has more than once."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = SECTION.findall(ast.get_docstring(node) or "")
            yield from ((getattr(node, "lineno", 1), name) for name in sorted(set(found)) if found.count(name) > 1)


def test_no_section_stands_twice() -> None:
    found = [(str(file), *fault) for file in PACKAGE.rglob("*.py") for fault in repeated_sections(file.read_text())]
    assert found == []


@pytest.mark.parametrize(("section", "faults"), [("Args", [(1, "Args")]), ("Raises", [])])
def test_a_planted_one_is_found(section: str, faults: list[tuple[int, str]]) -> None:
    text = f'def f(a, b):\n    """Add.\n\n    Args:\n        a: one.\n\n    {section}:\n        b: two.\n    """\n'
    assert list(repeated_sections(text)) == faults
