"""Differences between the configuration of a checkpoint and that of the resumed run."""

from pathlib import Path

import pytest
import yaml

from tests.torchrun import ROOT
from vapo_mcore.checkpoint.changes import HARMLESS, changes, compare_configs
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import all_keys, dump_yaml
from vapo_mcore.errors import CheckpointError, ConfigError

KEPT = ROOT / "tests" / "cases" / "checkpoint" / "checkpoints" / "step_000007"

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
policy: {optimizer: {lr: 2.0e-06, cpu_offload: true}, epochs: 2}
data: {train: [{path: y}], eval: []}
"""
    found = changes(BEFORE, after)
    assert {change.key: change.harmless for change in found} == {
        "run.steps": True,
        "parallel.tensor_model_parallel_size": True,
        "policy.optimizer.lr": False,
        "policy.optimizer.cpu_offload": True,
        "policy.epochs": False,
        "data.train": False,
    }
    assert str(found[0]) == "run.steps: 4 -> 9"
    assert "policy.epochs: 1 (the default; not in the checkpoint) -> 2" in [str(change) for change in found]
    assert changes(BEFORE, BEFORE) == []


def test_the_harmless_keys_exist() -> None:
    keys = all_keys()
    assert [name for name in HARMLESS if not any(key == name or key.startswith(f"{name}.") for key in keys)] == []


def test_a_damaged_configuration_is_told() -> None:
    for text in ("run: [", "- 1"):
        with pytest.raises(CheckpointError, match="configuration in the checkpoint"):
            changes(text, BEFORE)


def compared(folder: Path, *overrides: str, allow: bool = False) -> list[str]:
    """What a resume says that goes on from ``folder`` with its saved configuration, by today's schema, and ``overrides``."""
    said: list[str] = []
    config = load_config(KEPT / "config.yaml", overrides, check_paths=False)
    compare_configs(config, folder, allow=allow, say=said.append)
    return said


def test_keys_that_an_earlier_version_did_not_have_are_no_change_at_their_defaults() -> None:
    saved = (KEPT / "config.yaml").read_text()
    now = dump_yaml(load_config(KEPT / "config.yaml", check_paths=False))
    for key in ("head_dropout:", "deduplicate:", "subsets:", "faults:"):
        assert key in now and key not in saved
    assert compared(KEPT) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("critic.head=mlp", "critic.head: 'linear' (the default; not in the checkpoint) -> 'mlp'"),
        ("data.deduplicate=true", "data.deduplicate: False (the default; not in the checkpoint) -> True"),
        ("algorithm.self_imitation.capacity=512", "algorithm.self_imitation.capacity: None -> 512"),  # on, with its defaults
        ("faults.loss_spike.factor=20", "faults.loss_spike.factor: None -> 20.0"),
        ("rollout.environment.name=calculator", "rollout.environment.max_turns: None -> 4"),
    ],
)
def test_a_new_key_that_is_not_at_its_default_is_told(override: str, line: str) -> None:
    with pytest.raises(ConfigError, match="these changes affect what is learned") as error:
        compared(KEPT, override)
    assert f"  {line}" in str(error.value).splitlines()
    assert f"configuration changed: {line} (allowed by --allow-config-change)" in compared(KEPT, override, allow=True)


def test_a_key_that_this_version_does_not_have_is_named_as_such(tmp_path: Path) -> None:
    document = yaml.safe_load((KEPT / "config.yaml").read_text())
    document["critic"]["momentum"] = 0.5
    document["policy"]["optimizer"]["lr"] = {"peak": 1.0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    said = compared(tmp_path, allow=True)
    assert [line.removeprefix("configuration changed: ").removesuffix(" (allowed by --allow-config-change)") for line in said] == [
        "critic.momentum: 0.5 -> this version has no such key",
        "policy.optimizer.lr.peak: 1.0 -> this version has no such key",
        "policy.optimizer.lr: None -> 1e-06",
    ]


def test_absent_keys_are_completed_from_the_saved_ones() -> None:
    gae = "algorithm: {advantage: {estimator: gae}}"
    assert changes(gae, "algorithm: {advantage: {estimator: gae, whiten: batch, values: before_update}}") == []
    found = changes(gae, "algorithm: {advantage: {estimator: grpo, whiten: 'off'}}")
    assert [(change.key, change.before, change.after) for change in found] == [
        ("algorithm.advantage.estimator", "gae", "grpo"),
        ("algorithm.advantage.whiten", "batch", "off"),
    ]
    # Without a critic its keys are left out: back at their defaults the estimator alone differs.
    grpo = "algorithm: {advantage: {estimator: grpo, whiten: 'off'}}"
    back = "algorithm: {advantage: {estimator: gae, whiten: 'off', lambda_critic: 1.0}}\ncritic: {epochs: 1, init: policy}"
    assert [change.key for change in changes(grpo, back)] == ["algorithm.advantage.estimator"]
    source = "data: {train: [{kind: file, path: a/b.json, verifier: math}]}"  # its name is derived from its path
    for name, different in (("b", 0), ("c", 1)):
        entry = {"kind": "file", "path": "a/b.json", "name": name, "verifier": "math", "weight": 1.0, "size": None}
        entry["fields"] = {"prompt": None, "answer": None, "answer_list": None, "id": None, "subsets": []}
        assert len(changes(source, yaml.safe_dump({"data": {"train": [entry]}}))) == different
