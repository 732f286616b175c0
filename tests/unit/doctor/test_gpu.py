"""GPU machines: devices that processes cannot use, Transformer Engine that does not fit, toolkit, caches, variables of the launch."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from vapo_mcore.doctor import gpu
from vapo_mcore.errors import ConfigError
from vapo_mcore.launch import environment
from vapo_mcore.megatron import devices, parallel

UUID = "GPU-8f1a2b3c-0000-1111-2222-333344445555"
ALL_PARTS = {"transformer-engine": "2.11.0", "transformer-engine-cu13": "2.11.0", "transformer-engine-torch": "2.11.0"}


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
    """CUDA's answers where torch is a CUDA build and sees ``count`` GPUs; 0: none is usable."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: namedtuple("properties", "name")(name))


def machine_root(folder: Path, gpus: int, driver: str) -> Path:
    (folder / "dev").mkdir()
    for index in range(gpus):
        (folder / "dev" / f"nvidia{index}").touch()
    (folder / "dev" / "nvidiactl").touch()
    (folder / "proc" / "driver" / "nvidia").mkdir(parents=True)
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Feb 22 01:44:30 UTC 2024\nGCC version: gcc 12.2.0\n"
    (folder / "proc" / "driver" / "nvidia" / "version").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("visible", "count", "processes", "says"),
    [
        (None, 8, 8, None),
        ("0,1", 2, 2, None),
        (f"{UUID},{UUID[:-1]}6", 2, 2, None),
        ("0,9,1", 1, 3, "CUDA_VISIBLE_DEVICES=0,9,1 has 3 entries, and CUDA uses 1 of them"),
        ("0,,1", 1, 1, "CUDA_VISIBLE_DEVICES=0,,1 has 3 entries, and CUDA uses 1"),
        (None, 4, 8, "4 GPUs for 8 processes on this node: each needs one; start 4, or show more"),
        ("3", 1, 8, "1 GPU (CUDA_VISIBLE_DEVICES=3) for 8 processes"),
    ],
)
def test_devices_of_processes(visible: str | None, count: int, processes: int, says: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, count)
    fault = devices.device_fault(processes, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert fault is None if says is None else fault is not None and fault.startswith(says)


def test_mig_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, "NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert devices.device_fault(1, {}) is None
    assert "NVIDIA H100 80GB HBM3 MIG 3g.40gb is a MIG slice: NCCL connects no two" in str(devices.device_fault(2, {}))


def test_driver_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts no GPU then, and a run would go on without them."""
    gpus(monkeypatch, 0)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", init)
    root = machine_root(tmp_path, 8, "550.54.15")
    assert devices.device_fault(1, {}, root) == (
        "this node has 8 NVIDIA GPUs, which torch cannot use: The NVIDIA driver on your system is too old (found version 12040). "
        "The driver is 550.54.15, and CUDA 13.0 needs 580 or newer; update it, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )
    for hidden in ("", "-1"):
        assert devices.device_fault(1, {"CUDA_VISIBLE_DEVICES": hidden}, root) is None
    (tmp_path / "laptop" / "dev").mkdir(parents=True)
    assert devices.device_fault(2, {}, tmp_path / "laptop") is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.device_fault(1, {}, root) is None


def test_training_refuses_before_it_uses_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="1 GPU for 2 processes"):
        parallel.initialize_distributed(1)


@pytest.mark.parametrize(
    ("parts", "status", "says"),
    [
        (ALL_PARTS, "ok", "2.11.0 with transformer-engine-cu13"),
        ({}, "warn", "see docs/cluster.md"),
        (
            ALL_PARTS | {"transformer-engine-cu12": "2.11.0"},
            "FAIL",
            "-cu13 and transformer-engine-cu12 are both installed",
        ),
        ({"transformer-engine": "2.11.0", "transformer-engine-cu13": "2.11.0"}, "FAIL", "`import megatron.core` fails without it"),
        (
            {"transformer-engine": "2.11.0", "transformer-engine-cu12": "2.11.0", "transformer-engine-torch": "2.11.0"},
            "FAIL",
            "transformer-engine-cu12, but torch is built with CUDA 13.0",
        ),
        (ALL_PARTS | {"transformer-engine-torch": "2.9.0"}, "FAIL", "parts of different versions"),
        ({"transformer-engine": "2.11.0"}, "FAIL", "without its library (transformer-engine-cu13)"),
    ],
)
def test_transformer_engine(parts: dict[str, str], status: str, says: str) -> None:
    finding = gpu.transformer_engine(parts, "13.0")
    assert finding.status == status and says in finding.detail
    assert status != "FAIL" or finding.detail.endswith("then install it as docs/cluster.md says")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (ALL_PARTS | {"transformer-engine-cu12": "2.11.0"}, "Transformer Engine: .* are both installed .*docs/cluster.md"),
        ({"transformer-engine": "2.11.0", "transformer-engine-cu13": "2.11.0"}, "Transformer Engine: its extension for torch is missing"),
    ],
)
def test_training_refuses_mixed_builds(parts: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Megatron-Core is imported, which would fail with a FileNotFoundError."""
    gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(parallel, "HAS_CUDA", True)
    monkeypatch.setattr(parallel, "installed_versions", lambda: parts)
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=says):
        parallel.initialize_distributed(1)


def test_toolkit(tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    without = {"CUDA_HOME": str(home), "PATH": str(tmp_path)}
    assert gpu.toolkit("13.0", without).status == "warn" and "no nvcc" in gpu.toolkit("13.0", without).detail
    for release, status in (("12.4", "warn"), ("13.0", "ok")):
        (home / "bin" / "nvcc").write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.48\n")
        (home / "bin" / "nvcc").chmod(0o755)
        assert gpu.toolkit("13.0", without).status == status
    assert "cudnn.h, nccl.h not in CPATH" in gpu.toolkit("13.0", without).detail
    for header in ("cudnn.h", "nccl.h"):
        (tmp_path / header).touch()
    assert "CPATH" not in gpu.toolkit("13.0", without | {"CPATH": str(tmp_path)}).detail


def test_caches(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unwritable = gpu.caches({"HOME": str(tmp_path / "file" / "home")})  # root may write everywhere but below a file
    assert unwritable.status == "FAIL" and "FLASHINFER_WORKSPACE_BASE" in unwritable.detail
    assert gpu.caches({"HOME": str(tmp_path)}).status == "ok"
    placed = {name: str(tmp_path / name) for name in environment.CACHES}
    assert gpu.caches(placed | {"HOME": str(tmp_path / "file" / "home")}).status == "ok"


def test_numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 8)
    (tmp_path / "node0").mkdir()
    assert gpu.numa(8, tmp_path).status == "ok"
    (tmp_path / "node1").mkdir()
    for numactl, processes, status in ((None, 8, "warn"), ("/usr/bin/numactl", 8, "ok"), ("/usr/bin/numactl", 4, "warn")):
        monkeypatch.setattr(gpu.shutil, "which", lambda *_, numactl=numactl: numactl)
        assert gpu.numa(processes, tmp_path).status == status


@pytest.mark.parametrize(("capability", "needed"), [("9.0", True), ("8.0", True), ("10.0", False)])
def test_launch_variables(capability: str, needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``nvidia-smi`` as it answers on a node of two GPUs."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {capability}\necho {capability}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for module in (environment, gpu):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(96)))
    right = environment.process_defaults(8, {})
    assert right == {"OMP_NUM_THREADS": "12", "NCCL_DEBUG": "WARN"} | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if needed else {})
    assert environment.process_defaults(8, {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == {}
    assert gpu.launch_variables(8, right).status == "ok"
    assert "THP_MEM_ALLOC_ENABLE" not in right
    by_hand = gpu.launch_variables(8, {"OMP_NUM_THREADS": "1"})  # what torchrun sets
    assert by_hand.status == "warn" and "OMP_NUM_THREADS=12" in by_hand.detail and "NCCL_DEBUG=WARN" in by_hand.detail
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in by_hand.detail) == needed


def test_node_sets_variables_and_node_local_caches(tmp_path: Path) -> None:
    """What a command under ``launch.node`` gets, in jobs of sbatch and of nemo-run alike; what is set stays."""
    show = "import os, resource; print(*(os.environ.get(n) for n in {names}), len(set(resource.getrlimit(resource.RLIMIT_MEMLOCK))))"
    names = ("OMP_NUM_THREADS", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "NCCL_DEBUG")
    command = [sys.executable, "-m", "vapo_mcore.launch.node", sys.executable, "-c", show.format(names=names), "--nproc-per-node", "10000"]
    given = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "VLLM_CACHE_ROOT": "/mine"}
    result = subprocess.run(command, capture_output=True, text=True, env=given, check=True)
    caches = tmp_path / f"vapo_mcore_cache_{environment.os.getuid()}"
    assert result.stdout.split() == ["1", f"{caches}/triton", "/mine", f"{caches}/flashinfer", f"{caches}/inductor", "None", "1"]


@pytest.mark.parametrize(
    ("command", "processes"), [("torchrun --nnodes 2 --nproc-per-node 8 x", 8), ("torchrun --nproc_per_node=4 x", 4), ("torchrun x", 1)]
)
def test_processes_of_a_torchrun_command(command: str, processes: int) -> None:
    assert environment.processes_of(command.split()) == processes
