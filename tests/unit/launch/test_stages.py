"""The jobs of a run: what each one is told to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import write_base
from vapo_mcore.cli import main
from vapo_mcore.errors import ConfigError
from vapo_mcore.launch.stages import stage_jobs


def test_training_takes_the_critic_of_the_pretraining_job(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    pretrain, train, evaluation = stage_jobs(base, ["run.steps=9"], ["eval", "train", "pretrain"])
    assert (pretrain.config.run.steps, train.config.run.steps) == (0, 9)
    assert pretrain.config.critic.value_pretraining.max_steps == 50
    assert train.config.critic.value_pretraining.max_steps == 0
    assert pretrain.config.run.dir == f"{tmp_path}/run_value_pretraining"
    assert (train.config.critic.init, train.config.critic.path) == ("saved", f"{pretrain.config.run.dir}/critic_pretrained/hf")
    assert train.config.run.dir == f"{tmp_path}/run"
    assert pretrain.arguments(Path("/f.yaml")) == ["train", "/f.yaml", "--resume"]
    assert evaluation.arguments(Path("/f.yaml")) == ["eval", "/f.yaml", "--checkpoint", f"{tmp_path}/run/export/hf"]


def test_training_alone_pretrains_itself(tmp_path: Path) -> None:
    (job,) = stage_jobs(write_base(tmp_path), [], ["train"])
    assert job.config.critic.value_pretraining.max_steps == 50
    assert job.config.critic.init == "policy"


@pytest.mark.parametrize(
    ("stage", "override", "message"),
    [
        ("pretrain", "critic.value_pretraining.steps=0", "this recipe has no value pretraining"),
        ("pretrain", "algorithm.advantage.estimator=grpo", "this recipe has no value pretraining"),
        ("eval", "data.eval=[]", "data.eval is empty"),
        ("train,eval", "export.at_end=false", "export.at_end = false, so the training job leaves no model to evaluate"),
    ],
)
def test_stages_that_do_not_fit_the_recipe(stage: str, override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_jobs(write_base(tmp_path), [override], stage.split(","))


def test_faults_of_recipe_and_executor_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path)
    (tmp_path / "cluster.yaml").write_text("account: a\n")
    assert main(["launch", str(base), "run.steps=-1", "--executor", "slurm", "--cluster", str(tmp_path / "cluster.yaml")]) == 2
    error = capsys.readouterr().err
    assert "run.steps: -1 must be >= 0" in error
    assert "partition: is required" in error


@pytest.mark.parametrize(("folder", "stage"), [("my runs/x", "train"), ("höhe", "train"), ("my runs/x", "eval")])
def test_paths_that_do_not_reach_a_process_of_this_machine(
    folder: str, stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, safe = f"run.dir={tmp_path}/{folder}", ["--set", f"logs={tmp_path}/logs"]
    command = ["launch", str(write_base(tmp_path)), "--executor", "local", "--dry-run", "--stages", stage, run]
    assert main([*command, *(safe if stage == "eval" else [])]) == 2
    assert f"--executor local: '{tmp_path}/{folder}" in capsys.readouterr().err
    if stage == "train":
        assert main([*command, *safe]) == 0


def test_options_are_read_without_packages_from_elsewhere() -> None:
    read = "from vapo_mcore.cli import _parse; _parse(['launch', 'x.yaml', '--executor', 'local'])"
    code = f"import sys; {read}; print('pydantic' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executor", "slurm"], "requires --cluster FILE"),
        (["--executor", "local", "--stages", "train,evil"], "'evil' must be one of doctor, pretrain, train, eval"),
        (["--executor", "local", "--name", "a b"], "--name 'a b' must consist of letters"),
        (["--executor", "local", "--after", "12"], "--after names Slurm jobs"),
        (["--executor", "local", "--set", "logs=x"], "logs: 'x' must be an absolute path"),
    ],
)
def test_bad_options(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(write_base(tmp_path)), *arguments]) == 2
    assert message in capsys.readouterr().err
