"""Differences between the configuration of a checkpoint and that of the resumed run."""

import pytest

from vapo_mcore.checkpoint.changes import HARMLESS, changes
from vapo_mcore.config.loading import all_keys
from vapo_mcore.errors import CheckpointError

BEFORE = """
run: {dir: a, steps: 4}
parallel: {tensor_model_parallel_size: 2}
policy: {optimizer: {lr: 1.0e-06}}
data: {train: [{path: x}], eval: []}
"""


def test_what_differs_is_listed_with_both_values() -> None:
    after = """
run: {dir: a, steps: 9}
parallel: {tensor_model_parallel_size: 1}
policy: {optimizer: {lr: 2.0e-06}, epochs: 2}
data: {train: [{path: y}], eval: []}
"""
    found = changes(BEFORE, after)
    assert {change.key: change.harmless for change in found} == {
        "run.steps": True,
        "parallel.tensor_model_parallel_size": True,
        "policy.optimizer.lr": False,
        "policy.epochs": False,
        "data.train": False,
    }
    assert str(found[0]) == "run.steps: 4 -> 9"
    assert "policy.epochs: None -> 2" in [str(change) for change in found]
    assert changes(BEFORE, BEFORE) == []


def test_the_harmless_keys_exist() -> None:
    keys = all_keys()
    assert [name for name in HARMLESS if not any(key == name or key.startswith(f"{name}.") for key in keys)] == []


def test_a_damaged_configuration_is_told() -> None:
    for text in ("run: [", "- 1"):
        with pytest.raises(CheckpointError, match="configuration in the checkpoint"):
            changes(text, BEFORE)
