"""Which folder of a checkpoint is evaluated."""

from pathlib import Path

from vapo_mcore.commands.evaluate_command import weights_folder


def test_the_weights_of_a_training_checkpoint_are_those_of_its_policy(tmp_path: Path) -> None:
    assert weights_folder(str(tmp_path)) == str(tmp_path)
    weights = tmp_path / "policy" / "weights"
    weights.mkdir(parents=True)
    assert weights_folder(str(tmp_path)) == str(tmp_path)
    (weights / ".metadata").touch()
    assert weights_folder(str(tmp_path)) == str(weights)
