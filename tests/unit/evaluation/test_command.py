"""Which folder of a checkpoint is evaluated, and which settings do not matter."""

from pathlib import Path

import pytest

from tests.unit.config_helpers import faults_of, load, write_base
from vapo_mcore.cli import main
from vapo_mcore.commands.evaluate_command import weights_folder
from vapo_mcore.config import load_config


def test_the_weights_of_a_training_checkpoint_are_those_of_its_policy(tmp_path: Path) -> None:
    assert weights_folder(str(tmp_path)) == str(tmp_path)
    weights = tmp_path / "policy" / "weights"
    weights.mkdir(parents=True)
    assert weights_folder(str(tmp_path)) == str(tmp_path)
    (weights / ".metadata").touch()
    assert weights_folder(str(tmp_path)) == str(weights)


def test_the_critic_s_layout_and_model_do_not_matter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A recipe of two ranks, evaluated on one. The rules of the policy's layout hold as ever."""
    file = write_base(tmp_path)
    recipe = ("parallel.world_size=2", "critic.parallel.tensor_model_parallel_size=2")
    assert load(tmp_path, *recipe).layouts_differ
    own = (*recipe, f"critic={{init: saved, path: {tmp_path}/gone, value_pretraining: {{steps: 0}}}}", "parallel.world_size=1")
    faults = faults_of(tmp_path, *own)
    assert [fault.split(":")[0] for fault in faults] == ["critic.path", "critic.parallel"]
    config = load_config(file, own, builds_critic=False)
    assert (config.parallel.world_size, config.critic.parallel is not None) == (1, True)
    assert main(["eval", str(file), "--checkpoint", str(tmp_path / "model"), *own]) == 2
    printed = capfd.readouterr().err
    assert "model.safetensors" in printed and "critic." not in printed
    assert main(["eval", str(file), "--checkpoint", str(tmp_path / "model"), *own, "parallel.tensor_model_parallel_size=2"]) == 2
    assert "parallel.world_size: 1 processes cannot be split" in capfd.readouterr().err
