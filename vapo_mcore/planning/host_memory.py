"""Host memory that offloading takes, against what this machine has: checked before a model loads. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import ConfigError
from vapo_mcore.planning.state import offload_host_bytes

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_GIB = 2**30


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that new host allocations can take: free memory, page cache included, inside this process's control groups."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_control_group_bytes(root)])


def _control_group_bytes(root: Path) -> Iterator[int]:
    """What each enclosing control group with a limit leaves; its cache of files that nothing uses counts as free."""
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path).parts[1:]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            try:
                text = (folder / limit).read_text(encoding="ascii").strip()
                used = int((folder / usage).read_text(encoding="ascii"))
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            except (OSError, ValueError):
                continue  # not a group of this kind, or not visible from inside a container
            if text != "max":
                yield max(0, int(text) - used + int(stat.get("inactive_file", 0)))


def check_host_memory(config: Config, *, processes: int, cuda: bool, available: int | None = None) -> None:
    """Raise ConfigError if this node cannot hold what its processes offload.

    Args:
        processes: of the run on this node.
        cuda: whether the devices are GPUs: ``model.offload: null`` is then on.
        available: bytes; by default those of this machine.
    """
    if not (cuda if config.model.offload is None else config.model.offload):
        return
    folders = [config.model.path] + ([config.critic.path] if config.uses_critic and config.critic.path is not None else [])
    policy, *critic = [read_architecture(folder) for folder in folders]
    needed = offload_host_bytes(config, policy, critic[0] if critic else None, processes_per_node=processes)
    free = available_host_bytes() if available is None else available
    if needed <= free:
        return
    models = ["the policy", *(["the critic"] if config.uses_critic else []), *(["the reference"] if config.uses_reference else [])]
    raise ConfigError(
        f"model.offload: weights and optimizer state of {' and '.join(models)} take {needed / _GIB:.2f} GiB of host memory for the "
        f"{processes} process{'' if processes == 1 else 'es'} on this node, and {free / _GIB:.2f} GiB are available. With more nodes each "
        "holds a smaller part (more data parallelism splits the optimizer state, more tensor or pipeline parallelism everything)"
        + ("; or set model.offload: false, if the devices hold all models at once" if cuda else "; or set model.offload: false")
    )
