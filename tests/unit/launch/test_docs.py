"""The cluster pages: recipes fit their nodes, keys are documented; the scripts are clean; the image is pinned and not root's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import commands_in
from tests.torchrun import ROOT
from vapo_mcore.cli import _parse
from vapo_mcore.config import load_config
from vapo_mcore.launch.cluster import SlurmConfig, check_layout, load_slurm

PAGE = ROOT / "docs" / "cluster.md"
SCRIPTS = sorted(path for path in (ROOT / "slurm").iterdir() if path.suffix in (".sbatch", ".sh"))

JOB = {"SLURM_JOB_ID": "1", "VAPO_PROCESSES": "1"}


@pytest.mark.parametrize("command", [command for command in commands_in(PAGE) if "--executor slurm" in command])
def test_launch_takes_the_nodes_that_the_page_says(command: str) -> None:
    options = _parse(command.split()[1:])
    config = load_config(ROOT / options.file, options.overrides, check_paths=False)
    assert check_layout(config, load_slurm(ROOT / options.cluster, options.set), "/lustre/me/vapo") == 16


def test_every_key_of_a_cluster_file_is_documented() -> None:
    text = PAGE.read_text()
    assert [name for name in SlurmConfig.model_fields if f"`{name}`" not in text and f"`{name}:" not in text] == []


def test_scripts_are_clean() -> None:
    assert len(SCRIPTS) == 2
    result = subprocess.run([str(Path(sys.executable).parent / "shellcheck"), *SCRIPTS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["vapo.sbatch"], {"SLURM_JOB_ID": "1"}, "error: usage: sbatch"),
        (["vapo.sbatch", "train", "x.yaml"], {}, "error: this script is for sbatch"),
        (["vapo.sbatch", "train", "x.yaml"], {"SLURM_JOB_ID": "1"}, "error: processes a node: ''; this node has no GPUs"),
        (["vapo.sbatch", "plan", "x.yaml"], JOB, "error: usage: sbatch"),
        (["vapo.sbatch", "train", "x.yaml"], {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "0"}, "error: processes a node: '0'"),
        (["vapo.sbatch", "train", "x.yaml"], {"SLURM_JOB_ID": "1", "VAPO_PROCESSES": "gpu"}, "error: processes a node: 'gpu'"),
        (["vapo.sbatch", "train", "x.yaml"], {**JOB, "VAPO_REQUEUES": "no"}, "VAPO_REQUEUES=no is not"),
        (["vapo.sbatch", "train", "x.yaml"], {**JOB, "VAPO_MOUNTS": "/a"}, "VAPO_MOUNTS is set, and"),
        (
            ["vapo.sbatch", "train", "x.yaml"],
            {**JOB, "VAPO_IMAGE": "x", "VAPO_PATH": "/venv/bin"},
            "VAPO_PATH has no effect in the container",
        ),
        (
            ["vapo.sbatch", "train", "x.yaml"],
            {**JOB, "VAPO_PATH": "/no"},
            "error: VAPO_PATH=/no has no torchrun",
        ),
        (["vapo.sbatch", "train", "x.yaml"], {**JOB, "VAPO_IMAGE": "x"}, "pyxis is not installed"),
        (["chain.sh", "runs/x", "missing.yaml"], {}, "error: usage: slurm/chain.sh"),
    ],
)
def test_scripts_explain_what_is_wrong(arguments: list[str], environment: dict[str, str], message: str) -> None:
    command = ["bash", str(ROOT / "slurm" / arguments[0]), *arguments[1:]]
    result = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False)
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr


def _stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_job_of_a_container_in_a_folder_with_spaces(tmp_path: Path) -> None:
    """What srun is given, word by word, and that exit code 75 queues the job again as often as it may."""
    log = tmp_path / "log"
    _stand_in(tmp_path, "srun", f'[ "$1" = --help ] && echo --container-image && exit\nprintf "%s\\n" "$@" > {log}; exit 75')
    _stand_in(tmp_path, "scontrol", f'[ "$1" = show ] && echo n1 || echo "again $*" >> {log}')
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "12",
        "SLURM_SUBMIT_DIR": "/my data",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "VAPO_PROCESSES": "8",
        "VAPO_IMAGE": "/my images/x.sqsh",
    }
    command = ["bash", str(ROOT / "slurm" / "vapo.sbatch"), "train", "my recipe.yaml", "run.dir=my run"]
    for count, again in (("1", True), ("2", False)):
        result = subprocess.run(
            command, env={**environment, "SLURM_RESTART_COUNT": count, "VAPO_REQUEUES": "2"}, capture_output=True, text=True, check=False
        )
        words = log.read_text().splitlines()
        assert (result.returncode, words[-1] == "again requeue 12") == (75, again), result.stderr
        assert {"--container-image=/my images/x.sqsh", "--container-mounts=/my data:/my data", "--no-container-mount-home"} < set(words)
        assert words[words.index("--directory") + 1 :][:2] == ["/my data", "torchrun"]
        assert words[words.index("vapo_mcore.cli") + 1 :][:4] == ["train", "--resume", "my recipe.yaml", "run.dir=my run"]
        assert "n1:20012" in words


def test_a_chain_whose_last_job_is_refused_leaves_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _stand_in(tmp_path, "sbatch", f'echo "$@" >> {log}; count=$(wc -l < {log}); [ $count -lt 3 ] && echo $count || exit 1')
    _stand_in(tmp_path, "scancel", f'echo "cancelled $*" >> {log}')
    recipe = tmp_path / "a recipe.yaml"
    recipe.write_text("")
    command = ["bash", str(ROOT / "slurm" / "chain.sh"), "runs/x/", str(recipe), "-p", "batch", "--", "seed=3"]
    result = subprocess.run(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "pretrain: job 1\ntrain: job 2\n")
    first, second, third, cancelled = log.read_text().splitlines()
    assert " -p batch " in first and first.endswith("seed=3 run.dir=runs/x_value_pretraining run.steps=0 eval.at_start=false")
    assert "--dependency=afterok:1" in second and "critic.path=runs/x_value_pretraining/critic_pretrained/hf" in second
    assert "--dependency=afterok:2" in third and "--checkpoint runs/x/export/hf" in third
    assert cancelled == "cancelled 1 2"


def test_image_is_pinned_and_not_roots() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d+\.\d+", base)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["vapo"]
    installed = [word for line in lines if "pip install" in line for word in re.findall(r'"([^"]+)"', line) if "import" not in word]
    assert len(installed) >= 4
    assert [word for word in installed if not re.fullmatch(r"[a-z-]+(\[[a-z0-9_,]+\])?==[0-9.]+|\.\[tracking\]", word)] == []
    assert "make setup-gpu" in PAGE.read_text()  # without a container; tests/unit/tools/test_setup_gpu.py compares the versions
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word.removeprefix("./") for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_packages_of_launch_are_those_that_the_tests_run_with() -> None:
    launch, cpu = (
        {line for line in (ROOT / "requirements" / name).read_text().splitlines() if "==" in line} for name in ("launch.txt", "cpu.txt")
    )
    assert any(line.startswith("nemo_run==") for line in launch)
    assert launch < cpu
