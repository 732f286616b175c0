"""The scripts that ``launch`` has nemo-run render: line by line, and without secrets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from vapo_mcore.cli import main

CLUSTER = ROOT / "examples" / "configs" / "clusters" / "slurm_pyxis.yaml"
RECIPE = ROOT / "examples" / "configs" / "qwen2.5_32b_vapo.yaml"
GOLDEN = ROOT / "tests" / "cases" / "launch_16_nodes.sbatch"
"""16 nodes of 8 GPUs with a container; DIRECTORY is the working directory, TIME when it was rendered."""


def _dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Output of a dry run of the 32B recipe, started in ``tmp_path``; its model is not on this machine."""
    mounts = f'container.mounts=["/lustre:/lustre", "{tmp_path}:{tmp_path}"]'
    options = ["--executor", "slurm", "--cluster", str(CLUSTER), "--set", mounts, "--name", "vapo32b", "--dry-run"]
    assert main(["launch", str(RECIPE), *options, *arguments]) == 0
    output = capsys.readouterr().out
    return re.sub(r"vapo32b_\d{8}-\d{6}-\d{6}", "vapo32b_TIME", output).replace(str(tmp_path), "DIRECTORY")


def test_sixteen_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "value-of-the-secret")
    arguments = ["--set", "secrets=[WANDB_API_KEY]", "--after", "12,34"]
    output = _dry_run(tmp_path, capsys, *arguments)
    assert "value-of-the-secret" not in output
    assert output.splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()
    checked = subprocess.run(["bash", "-n"], input=output, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []  # a dry run writes nothing


def test_without_a_container_and_in_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["container=null", "path=/lustre/venv/bin", "setup=[module load cuda]", "max_requeues=0", "nodes=2"]
    settings += ["sbatch={qos: high, contiguous: false, comment: two words}", "environment.GREETING=two $(words)"]
    settings += ["cpus_per_task=12", "srun=[--mpi=none]"]
    arguments = ["parallel.world_size=16", "--stages", "doctor,pretrain,train,eval"]
    output = _dry_run(tmp_path, capsys, *arguments, *(text for setting in settings for text in ("--set", setting)))
    assert "container" not in output
    scripts = re.split(r"^# --- (\w+).*\n", output, flags=re.MULTILINE)[1:]
    assert scripts[::2] == ["doctor", "pretrain", "train", "eval"]
    for name, script in zip(scripts[::2], scripts[1::2], strict=True):
        assert 'export PATH=/lustre/venv/bin:"$PATH"\nmodule load cuda\n' in script
        assert "export GREETING='two $(words)'\n" in script
        assert "#SBATCH --qos=high\n" in script
        assert "#SBATCH --comment='two words'\n" in script
        assert "contiguous" not in script
        assert "#SBATCH --no-requeue\n" in script
        assert "--requeue\n" not in script.partition("# Parameters")[2]
        assert "#SBATCH --cpus-per-task=12\n" in script
        assert " --cpus-per-task=12 --mpi=none python -m vapo_mcore.launch.node " in script
        assert "#SBATCH --nodes=2\n" in script
        assert f"#SBATCH --job-name=vapo32b.{name}\n" in script
        assert "queue_again" not in script
        assert ("kill-on-invalid-dep" in script) == (name != "doctor")
    commands = [line.partition(" -m vapo_mcore.cli ")[2].split()[0] for line in output.splitlines() if line.startswith("srun")]
    assert commands == ["doctor", "train", "train", "eval"]


def test_without_nemo_run_it_is_one_message() -> None:
    code = "import sys; sys.modules['nemo_run'] = None; from vapo_mcore.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "launch", str(RECIPE), "--executor", "slurm", "--cluster", str(CLUSTER), "--dry-run"]
    command += ["--set", f"container.mounts=[{ROOT}, /lustre]"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: launch requires nemo-run, which cannot be imported")
    assert "pip install -e '.[launch]'" in result.stderr
    assert result.stderr.count("\n") == 1
