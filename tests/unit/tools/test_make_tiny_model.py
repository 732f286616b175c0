"""The tiny model's script never replaces a folder that it did not make (what it makes: tests/integration/test_make_tiny_model.py)."""

from pathlib import Path

import pytest
from make_tiny_model import require_own_folder

from vapo_mcore.errors import DataError


@pytest.mark.parametrize("names", [[], ["train.jsonl", "heldout.jsonl", "model.safetensors", "checksums.json", "config.json", ".made"]])
def test_own_and_empty_folders_may_be_replaced(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    require_own_folder(tmp_path)
    require_own_folder(tmp_path / "new")


@pytest.mark.parametrize("names", [["thesis.tex"], ["config.json", "model.safetensors"], ["train.jsonl", "heldout.jsonl", "notes.txt"]])
def test_foreign_folders_are_left_alone(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    for output in (tmp_path, tmp_path / names[0]):
        with pytest.raises(DataError, match="not a folder that this script made; nothing was changed"):
            require_own_folder(output)
