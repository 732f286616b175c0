"""make setup: what it installs is there and as pinned; what is missing on a machine is one line with its remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setup_environment

from tests.torchrun import ROOT

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
PIP_FAILURES = {
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device": "the disk is full",
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
    "ERROR: No matching distribution found for torch==2.13.0": r"cannot reach the package index \(NewConnectionError\)",
    "pip._vendor.urllib3.exceptions.ProtocolError: ('Connection broken: IncompleteRead(1 bytes read)')": "cannot reach the package index",
    "ERROR: Could not find a version that satisfies the requirement torch==9 (from versions: 2.13.0)\n"
    "ERROR: No matching distribution found for torch==9": rf"pip finds no torch==9 for Python {HERE}",
    "torch/CUDAContextLight.h:10:10: fatal error: cusparse.h: No such file or directory\n  error: failed-wheel-build-for-install": (
        "failed: torch/CUDAContextLight.h:10:10: fatal error: cusparse.h: No such file"
    ),
    "  error: command '/usr/bin/gcc' failed with exit code 1\nmore": "failed:   error: command '/usr/bin/gcc' failed",
}


def call(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "setup_environment.py"), "--venv", str(venv)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """As typed in a terminal, also where a make runs the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    command = ["make", "-C", str(ROOT), "--no-print-directory", "setup", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def fake_python(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "python").write_text(f"#!/bin/sh\necho {version}\n")
    (folder / "python").chmod(0o755)
    return folder / "python"


def one_error(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error; make adds its own."""
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    return lines[0]


def test_everything_pinned_is_installed_and_imports() -> None:
    pins = setup_environment.read_pins(setup_environment.PINS)
    import torch

    if torch.version.cuda is not None:
        pins |= setup_environment.read_pins(setup_environment.CUDA_PINS)
    different = {
        name: (version, found) for name, version in pins.items() if (found := importlib.metadata.version(name).partition("+")[0]) != version
    }
    assert different == {}
    found = "accelerate gguf hypothesis leptonai math_verify matplotlib mypy nemo_run numba pebble pyarrow pydantic reasoning_gym rich ruff"
    found += " tensorboard torchx wandb xdist xgrammar yaml"
    assert [module for module in found.split() if importlib.util.find_spec(module) is None] == []
    command = [sys.executable, "-W", "ignore", "-c", setup_environment.IMPORTS]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}, check=False)
    assert result.returncode == 0, result.stderr


def test_importing_writes_bytecode_also_where_processes_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vapo_test_module.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(setup_environment, "IMPORTS", "import vapo_test_module")
    setup_environment.check_imports(Path(sys.executable), tmp_path / "setup.log")
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == [f"vapo_test_module.cpython-{HERE.replace('.', '')}.pyc"]


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "does not run; install Python 3.11 or 3.12, or give its path"),
        ("3.13", "is Python 3.13; 3.11 and 3.12 are supported"),
        ("2.7", "is Python 2.7; 3.11 and 3.12 are supported"),
    ],
)
def test_wrong_python(version: str | None, says: str, tmp_path: Path) -> None:
    python = tmp_path / "none" if version is None else fake_python(tmp_path, version)
    assert says in one_error(make(f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"))
    assert not (tmp_path / "venv").exists()


def test_environment_of_another_python(tmp_path: Path) -> None:
    other = {"3.11": "3.12", "3.12": "3.11"}[HERE]
    fake_python(tmp_path / "venv" / "bin", other)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "venv" / ".installed").touch()  # up to date: the given PYTHON is compared all the same
    error = one_error(make(f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}"))
    assert f"has Python {other}" in error and f"VENV=.venv{HERE}" in error
    assert f"has Python {other}, not {HERE}" in one_error(call(tmp_path / "venv"))


def test_missing_compiler_and_venv_module(tmp_path: Path) -> None:
    (tmp_path / "venv.py").write_text("raise ImportError")
    error = one_error(call(tmp_path / "environment", PATH=str(tmp_path), PYTHONPATH=str(tmp_path), CC=""))
    assert "apt-get install build-essential" in error and f"apt-get install python{HERE}-venv" in error
    assert "CC=nowhere-cc -O2 is not installed" in one_error(call(tmp_path / "environment", CC="nowhere-cc -O2"))
    assert not (tmp_path / "environment").exists()


def test_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    assert "is not a virtual environment" in one_error(call(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_dead_network_and_interrupted_environment(tmp_path: Path) -> None:
    """An environment whose creation was interrupted is completed; without a network there is one line, and the environment stays."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("home = /nowhere\n")
    dead = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    error = one_error(call(venv, **dead))
    assert "cannot reach the package index" in error and error.endswith("`make setup` continues where it stopped")
    assert subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("output", "says"), PIP_FAILURES.items())
def test_pip_failures_are_one_line(output: str, says: str, tmp_path: Path) -> None:
    line = setup_environment.explain(output, "packages", tmp_path)
    assert "\n" not in line and re.search(says, line), line


def test_too_small_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "present").write_bytes(b"1" * 10**6)
    with pytest.raises(setup_environment.SetupError, match=r"needs 999999999.9|needs 1000000000.0"):
        setup_environment.require_space(tmp_path, 1e9)
    setup_environment.require_space(tmp_path, 0.0011)


@pytest.mark.parametrize(
    ("requirement", "build"), [("nvidia-cudnn-cu13==9", "cuda"), ("cuda-toolkit[nvtx]==13", "cuda"), ("jinja2", "cpu")]
)
def test_build_of_torch_is_what_pip_resolves(requirement: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(python: Path, arguments: list[str], *_: object) -> None:
        report = Path(arguments[arguments.index("--report") + 1])
        report.write_text(json.dumps({"install": [{"metadata": {"version": "2.13.0+x", "requires_dist": ["filelock", requirement]}}]}))

    monkeypatch.setattr(setup_environment, "run_pip", pip)
    assert setup_environment.torch_build(tmp_path / "no" / "python", "2.13.0", tmp_path / "log") == (build, "2.13.0+x")


def test_parts_hold_each_pin_once() -> None:
    pins = setup_environment.read_pins(setup_environment.PINS) | setup_environment.read_pins(setup_environment.CUDA_PINS)
    parts = setup_environment.in_parts(pins, first=("setuptools", "torch"))
    assert parts[0] == ["setuptools==78.1.1"] and ["triton==3.7.1"] in parts and max(map(len, parts)) <= setup_environment.PART
    assert sorted(pin for part in parts for pin in part) == sorted(f"{name}=={version}" for name, version in pins.items())


@pytest.mark.slow
def test_setup_as_on_an_ordinary_machine(tmp_path: Path) -> None:
    """Only the public index: the CUDA build of torch, about 3 GB to download and 6.4 GB on disk. A second call has nothing to do."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in ("PIP_CERT", "PIP_DEFAULT_TIMEOUT")
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    command = ["make", "-C", str(ROOT), "setup", f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert "the CUDA build, the only one that pip finds" in result.stdout and "all as pinned" in result.stdout
    tests = [tmp_path / "venv" / "bin" / "python", "-m", "pytest", "-q", __file__, "-k", "everything_pinned"]
    subprocess.run(tests, cwd=ROOT, env=environment, check=True)
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 0 and "download" not in again.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_full_disk_is_said_before_anything_is_made(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        command = [sys.executable, str(ROOT / "tools" / "setup_environment.py"), "--venv", str(tmp_path / "deep" / "venv")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout, list(tmp_path.iterdir())) == (2, "", [])
        assert re.fullmatch(
            r"error: \S+ needs 3\.6 GB more, but only 0\.0 GB are free; free space, or choose another folder .*\n", result.stderr
        )
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
