"""Load the scripts of ``benchmarks/``, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_benchmark(name: str) -> ModuleType:
    """Execute ``benchmarks/NAME.py`` as a module of its own and return it."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", Path(__file__).parents[1] / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
