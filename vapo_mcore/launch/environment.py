"""Environment variables that the processes of a node need and that are not set yet, and limits that they inherit.

``launch/node.py`` sets them on each node of a job, for sbatch and nemo-run and inside the container alike; the local launcher sets
those of threads and devices. A variable that the user has set stays.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Compiled kernels. On a shared file system hundreds of ranks write the same files; an unwritable HOME makes flashinfer's import fail."""
_BLACKWELL = 10.0
"""Compute capability from which CUDA_DEVICE_MAX_CONNECTIONS=1 is not needed."""


def process_defaults(processes: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of threads and devices for ``processes`` processes on this node, without those that ``environment`` has.

    ``OMP_NUM_THREADS``: the cores of this process divided by the processes; torchrun would set 1, and the CPU optimizer runs on these
    threads. ``CUDA_DEVICE_MAX_CONNECTIONS=1``, up to Hopper: Megatron-Core overlaps tensor-parallel communication with computation only
    if kernels start in the order in which they are queued.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}
    capabilities = compute_capabilities()
    if capabilities:
        defaults["NCCL_DEBUG"] = "WARN"
        if min(capabilities) < _BLACKWELL:
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in defaults.items() if name not in environment}


def node_defaults(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``process_defaults`` for a torchrun command, and caches in a folder of this node and user."""
    folder = Path(tempfile.gettempdir()) / f"vapo_mcore_cache_{os.getuid()}"
    caches = {name: str(folder / part) for name, part in CACHES.items() if name not in environment}
    return process_defaults(processes_of(command), environment) | caches


def processes_of(command: Sequence[str]) -> int:
    """The number behind torchrun's ``--nproc-per-node``; 1 without it, as torchrun has it."""
    for index, word in enumerate(command):
        option, assigned, value = word.partition("=")
        if option.replace("_", "-") == "--nproc-per-node":
            value = value if assigned else next(iter(command[index + 1 : index + 2]), "")
            return int(value) if value.isdigit() and int(value) > 0 else 1
    return 1


def compute_capabilities() -> list[float]:
    """Of the GPUs of this node, from the driver's tool: asking CUDA would take memory of the device for this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        return [float(line) for line in result.stdout.split()] if result.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []


def raise_locked_memory() -> None:
    """Raise the limit of locked memory as far as this user may: RDMA and page-locked buffers need it. The doctor reports the rest."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
