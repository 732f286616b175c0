"""Check what GPUs need besides a driver: Transformer Engine, CUDA toolkit, writable caches, NUMA binding, environment variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from vapo_mcore.doctor.report import Finding
from vapo_mcore.launch.environment import CACHES, compute_capabilities, process_defaults
from vapo_mcore.megatron.devices import installed_versions, transformer_engine_fault

_HEADERS = ("cudnn.h", "nccl.h")
_RELEASE = re.compile(r"release (\d+)\.(\d+)")


def gpu_findings(processes: int, launched: bool, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Run all checks of this module on a node whose torch uses CUDA. ``launched``: this process was started by torchrun."""
    import torch

    cuda = str(torch.version.cuda)
    findings = [transformer_engine(installed_versions(), cuda), toolkit(cuda, environment), caches(environment), numa(processes)]
    if launched:
        findings.append(launch_variables(processes, environment))
    return findings


def transformer_engine(versions: Mapping[str, str], cuda: str) -> Finding:
    """Check that Transformer Engine's packages match each other and torch. ``versions``: from ``installed_versions``; ``cuda``: torch's."""
    check = "Transformer Engine"
    if not versions:
        return Finding(check, "warn", "not installed: no model.attention=te, no fused layers; see docs/cluster.md")
    fault = transformer_engine_fault(versions, cuda)
    if fault is not None:
        return Finding(check, "FAIL", fault)
    library = next(name for name in versions if name.startswith("transformer-engine-cu"))
    return Finding(check, "ok", f"{versions['transformer-engine-torch']} with {library}")


def toolkit(cuda: str, environment: Mapping[str, str] = os.environ) -> Finding:
    """Check the compiler that builds Transformer Engine's extension and flashinfer's kernels, and the extension's headers."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    compiler = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc", path=environment.get("PATH", ""))
    if compiler is None:
        return Finding("CUDA toolkit", "warn", f"no nvcc in {home}/bin or PATH: kernels cannot be compiled; load a CUDA {cuda} toolkit")
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    release = _RELEASE.search(result.stdout)
    found = ".".join(release.groups()) if release else "of an unknown version"
    if release is None or release[1] != cuda.partition(".")[0]:
        return Finding("CUDA toolkit", "warn", f"{compiler} is {found}, but torch is built with CUDA {cuda}: load that toolkit")
    folders = [*environment.get("CPATH", "").split(":"), str(Path(compiler).parent.parent / "include"), "/usr/include"]
    missing = [header for header in _HEADERS if not any(folder and Path(folder, header).is_file() for folder in folders)]
    detail = f"{compiler} {found}"
    if missing:
        detail += f"; {', '.join(missing)} not in CPATH: needed only to compile Transformer Engine (docs/cluster.md)"
    return Finding("CUDA toolkit", "ok", detail)


def caches(environment: Mapping[str, str] = os.environ) -> Finding:
    """Check that the caches of compiled kernels are writable: importing flashinfer fails if its folder is not."""
    home = environment.get("HOME", "/")
    places = {name: environment.get(name, home) for name in CACHES}
    unwritable = {name: place for name, place in places.items() if not _writable(Path(place))}
    if unwritable:
        listed = ", ".join(f"{name} ({place})" for name, place in unwritable.items())
        remedy = "set them to a folder of the node, as jobs of slurm/ and launch do"
        return Finding("kernel caches", "FAIL", f"cannot be written: {listed}; {remedy}")
    at_home = [name for name in CACHES if name not in environment]
    if at_home:
        return Finding("kernel caches", "ok", f"in {home} ({', '.join(at_home)}); jobs of slurm/ and launch keep them on the node")
    return Finding("kernel caches", "ok", "all set: " + ", ".join(sorted({str(Path(place).parent) for place in places.values()})))


def _writable(folder: Path) -> bool:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def numa(processes: int, root: Path = Path("/sys/devices/system/node")) -> Finding:
    """Check that torchrun can bind each process to the cores near its GPU, which requires one process per GPU and numactl."""
    import torch

    domains = len(list(root.glob("node[0-9]*")))
    if domains > 1 and shutil.which("numactl") is None:
        return Finding("NUMA binding", "warn", f"{domains} NUMA domains and no numactl: torchrun cannot bind processes to them; install it")
    if domains > 1 and torch.cuda.device_count() != processes:
        seen = f"{torch.cuda.device_count()} GPUs and {processes} processes"
        return Finding(
            "NUMA binding",
            "warn",
            f"{domains} NUMA domains, {seen}: torchrun binds only one process per GPU; start as many, or bind them yourself",
        )
    return Finding("NUMA binding", "ok", f"{domains} NUMA domain{'' if domains == 1 else 's'}" + (", by torchrun" if domains > 1 else ""))


def launch_variables(processes: int, environment: Mapping[str, str] = os.environ) -> Finding:
    """Check the environment variables that jobs of slurm/ and launch set, but a manual torchrun does not."""
    right = process_defaults(processes, {})
    faults = []
    connections = right.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != connections:
        faults.append(f"CUDA_DEVICE_MAX_CONNECTIONS={connections} (these GPUs overlap tensor-parallel communication only with it)")
    threads = environment.get("OMP_NUM_THREADS", "1")
    if threads == "1" and right["OMP_NUM_THREADS"] != "1":
        faults.append(f"OMP_NUM_THREADS={right['OMP_NUM_THREADS']} (the CPU optimizer runs on one thread now)")
    if compute_capabilities() and "NCCL_DEBUG" not in environment:
        faults.append("NCCL_DEBUG=WARN (without it NCCL's errors give no reason)")
    if faults:
        return Finding("launch variables", "warn", "set " + "; ".join(faults))
    return Finding("launch variables", "ok", f"OMP_NUM_THREADS={threads}")
