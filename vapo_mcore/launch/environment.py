"""Default environment variables and limits of the processes on a node.

``launch/node.py`` sets them on each node of a job, with sbatch, with nemo-run and in containers; the local launcher sets those for
threads and devices. Variables set by the user are kept.
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
"""Caches of compiled kernels. On a shared file system hundreds of ranks would write the same files, and with an unwritable HOME importing
flashinfer fails."""
_BLACKWELL = 10.0
"""Compute capability from which on CUDA_DEVICE_MAX_CONNECTIONS=1 is not needed."""


def process_defaults(processes: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables for threads and devices of ``processes`` processes on this node, without those already in ``environment``.

    ``OMP_NUM_THREADS``: cores available to this process divided by the processes; torchrun would set 1, but the CPU optimizer uses these
    threads. ``CUDA_DEVICE_MAX_CONNECTIONS=1`` (up to Hopper): Megatron-Core overlaps tensor-parallel communication with computation only
    if kernels start in queue order. ``THP_MEM_ALLOC_ENABLE=1`` (without a GPU): PyTorch asks for huge pages for large tensors, whose first
    use then takes half the time.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}
    capabilities = compute_capabilities()
    if not capabilities:
        defaults["THP_MEM_ALLOC_ENABLE"] = "1"
    else:
        defaults["NCCL_DEBUG"] = "WARN"
        if min(capabilities) < _BLACKWELL:
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in defaults.items() if name not in environment}


def node_defaults(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``process_defaults`` for a torchrun command, and cache folders local to this node and user."""
    folder = Path(tempfile.gettempdir()) / f"vapo_mcore_cache_{os.getuid()}"
    caches = {name: str(folder / part) for name, part in CACHES.items() if name not in environment}
    return process_defaults(processes_of(command), environment) | caches


def processes_of(command: Sequence[str]) -> int:
    """Return the value of torchrun's ``--nproc-per-node``, default 1."""
    for index, word in enumerate(command):
        option, assigned, value = word.partition("=")
        if option.replace("_", "-") == "--nproc-per-node":
            value = value if assigned else next(iter(command[index + 1 : index + 2]), "")
            return int(value) if value.isdigit() and int(value) > 0 else 1
    return 1


def compute_capabilities() -> list[float]:
    """Return the compute capabilities of this node's GPUs from nvidia-smi; CUDA calls would allocate device memory."""
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
    """Raise the limit on locked memory to the hard limit, for RDMA and page-locked buffers. The doctor reports a low hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
