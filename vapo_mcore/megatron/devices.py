"""Check that each process of a node has a usable GPU, and that Transformer Engine fits torch, before either is used."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose."""
_OLDEST_DRIVERS = {12: 525, 13: 580}
"""Oldest driver for each CUDA major version (CUDA compatibility guide of NVIDIA)."""


def device_fault(processes: int, environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """Return why ``processes`` processes of this node cannot use one GPU each, or None if they can or no GPU is to be used.

    ``root`` contains ``dev`` and ``proc``.
    """
    if torch.version.cuda is None:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
        if not nodes or (visible is not None and visible.strip() in _HIDDEN):
            return None
        return _unusable(len(nodes), visible, root)
    count = torch.cuda.device_count()
    entries = visible.split(",") if visible is not None else []
    if visible is not None and len(entries) != count:
        return (
            f"CUDA_VISIBLE_DEVICES={visible} has {len(entries)} entries, and CUDA uses {count} of them: it ignores the first one "
            "that names no GPU and all after it; name GPUs of this node without gaps or repetitions, by index or by UUID (nvidia-smi -L)"
        )
    if count < processes:
        given = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        gpus = f"{count} GPU{'' if count == 1 else 's'}{given}"
        return f"{gpus} for {processes} processes on this node: each needs one; start {count}, or show more"
    slices = [name for index in range(count) if "MIG" in (name := torch.cuda.get_device_properties(index).name)]
    if slices and processes > 1:
        return f"{slices[0]} is a MIG slice: NCCL connects no two of them; use one process, or whole GPUs (nvidia-smi -mig 0)"
    return None


def _unusable(count: int, visible: str | None, root: Path) -> str:
    try:
        torch.cuda.init()
        reason = "CUDA finds none of them"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
    if visible is not None:
        reason += f"; CUDA_VISIBLE_DEVICES={visible}"
    driver, cuda = _driver(root), str(torch.version.cuda)
    oldest = _OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
    needed = f", and CUDA {cuda} needs {oldest} or newer" if oldest is not None else ""
    return (
        f"this node has {count} NVIDIA GPU{'' if count == 1 else 's'}, which torch cannot use: {reason}. The driver is {driver}{needed}; "
        "update it, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )


def _driver(root: Path) -> str:
    """Return the version of the kernel driver, such as "550.54.15"."""
    try:
        words = (root / "proc" / "driver" / "nvidia" / "version").read_text(encoding="utf-8").split()
    except OSError:
        return "not loaded"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed parts of Transformer Engine."""
    versions = {}
    for name in ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def transformer_engine_fault(versions: Mapping[str, str], cuda: str) -> str | None:
    """Return why these parts of Transformer Engine fit neither each other nor torch, which is built with ``cuda``; None if they do, or
    none is installed. With such parts ``import megatron.core`` fails, or kernels crash."""
    if not versions:
        return None
    again = "pip uninstall --yes " + " ".join(versions) + ", then install it as docs/cluster.md says"
    cores = [name for name in versions if re.fullmatch(r"transformer-engine-cu\d+", name)]
    fitting = f"transformer-engine-cu{cuda.partition('.')[0]}"
    if len(cores) > 1:
        return f"{' and '.join(cores)} are both installed and overwrite each other's library; {again}"
    if not cores:
        return f"transformer-engine without its library ({fitting}); {again}"
    if "transformer-engine-torch" not in versions:
        return f"its extension for torch is missing, and `import megatron.core` fails without it; {again}"
    if len(set(versions.values())) > 1:
        return f"parts of different versions: {', '.join(f'{name} {version}' for name, version in versions.items())}; {again}"
    return None if cores[0] == fitting else f"{cores[0]}, but torch is built with CUDA {cuda}; {again}"
