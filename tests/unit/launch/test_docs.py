"""Commands of the cluster pages exist as written; the scripts are clean; the image is pinned and not root's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from vapo_mcore.cli import _parse
from vapo_mcore.config import load_config
from vapo_mcore.launch.cluster import SlurmConfig, check_layout, load_slurm

PAGES = (ROOT / "docs" / "cluster.md", ROOT / "slurm" / "README.md")
SCRIPTS = sorted(path for path in (ROOT / "slurm").iterdir() if path.suffix in (".sbatch", ".sh"))
COMMANDS = [
    line for page in PAGES for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S) for line in block.splitlines()
]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("vapo-mcore")])
def test_command_is_understood_and_its_files_exist(command: str) -> None:
    arguments = command.split()[1:]
    options = _parse(arguments)
    assert options.command == arguments[0]
    assert [word for word in arguments if word.endswith(".yaml") and not (ROOT / word).is_file()] == []
    if options.command == "launch" and options.executor == "slurm":
        config = load_config(ROOT / options.file, options.overrides, check_paths=False)
        assert check_layout(config, load_slurm(ROOT / options.cluster, options.set), "/lustre/me/vapo") == 16


@pytest.mark.parametrize("command", [line for line in COMMANDS if "slurm/" in line or "torchrun" in line])
def test_job_command_is_understood(command: str) -> None:
    script = re.search(r"\S*slurm/(?:vapo.sbatch|chain.sh)", command)
    if script is None:
        _parse(command.partition(" -m vapo_mcore.cli ")[2].split())
        return
    assert (ROOT / script[0]).is_file()
    if script[0].endswith(".sbatch"):
        _parse(command.partition(script[0])[2].split())


def test_there_are_commands() -> None:
    assert sum(line.startswith("vapo-mcore") for line in COMMANDS) >= 6
    assert sum("slurm/" in line for line in COMMANDS) >= 4


def test_every_key_of_a_cluster_file_is_documented() -> None:
    text = PAGES[0].read_text()
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
        (["vapo.sbatch", "train", "x.yaml"], {"SLURM_JOB_ID": "1"}, "error: this node has no GPUs; give VAPO_PROCESSES"),
        (
            ["vapo.sbatch", "train", "x.yaml"],
            {"SLURM_JOB_ID": "1", "VAPO_PROCESSES": "1", "VAPO_PATH": "/no"},
            "error: VAPO_PATH=/no has no torchrun",
        ),
        (["vapo.sbatch", "train", "x.yaml"], {"SLURM_JOB_ID": "1", "VAPO_PROCESSES": "1", "VAPO_IMAGE": "x"}, "pyxis is not installed"),
        (["chain.sh", "runs/x", "missing.yaml"], {}, "error: usage: slurm/chain.sh"),
    ],
)
def test_scripts_explain_what_is_wrong(arguments: list[str], environment: dict[str, str], message: str) -> None:
    command = ["bash", str(ROOT / "slurm" / arguments[0]), *arguments[1:]]
    result = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True, text=True, check=False)
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr


def test_image_is_pinned_and_not_roots() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d+\.\d+", base)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["vapo"]
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word.removeprefix("./") for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
