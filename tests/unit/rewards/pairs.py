"""Labelled pairs of answers of ``tests/cases``."""

import json
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[2] / "cases"


def labelled_pairs(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / name).read_text("utf-8").splitlines()]
