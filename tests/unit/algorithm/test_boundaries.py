"""The package stays pure, and its documentation stays true: imports, the page's example, the page's defaults."""

import ast
import re
import sys
from pathlib import Path

import torch
import yaml

from vapo_mcore.config.schema import AlgorithmConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "algorithm.md").read_text()
ALLOWED = {"torch", "numpy", "numba", "vapo_mcore.algorithm", "vapo_mcore.errors"}


def test_the_package_imports_tensors_and_nothing_else() -> None:
    files = sorted((ROOT / "vapo_mcore" / "algorithm").glob("*.py"))
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = ".".join(name.split(".")[:2]) if name.startswith("vapo_mcore") else name.split(".")[0]
                assert root in ALLOWED or root in sys.stdlib_module_names, f"{file.name} imports {name}"


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_the_example_of_the_page_runs() -> None:
    names: dict[str, torch.Tensor] = {}
    exec(block("python"), names)
    assert names["returns"].tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert names["loss"].isfinite() and names["lam"].tolist() == [1 - 1 / 1.5, 0.0]


def test_the_settings_of_the_page_are_the_defaults() -> None:
    assert AlgorithmConfig(**yaml.safe_load(block("yaml"))["algorithm"]) == AlgorithmConfig()


def test_files_and_functions_that_the_page_names_exist() -> None:
    package = ROOT / "vapo_mcore" / "algorithm"
    source = "".join(file.read_text() for file in package.glob("*.py"))
    for file in re.findall(r"`(\w+\.py)`", PAGE):
        assert (package / file).exists(), file
    called = re.findall(r"`(\w+)`(?: in `\w+\.py`)?$", PAGE, re.MULTILINE) + re.findall(r"`(\w+)\(", PAGE)
    assert len(called) > 8
    for name in called:
        assert f"def {name}(" in source, name


def test_the_tests_of_all_traps_exist() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    for number, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, number
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), test
