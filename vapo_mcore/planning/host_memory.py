"""Check before a model loads that the host memory suffices for offloading and checkpoints. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.checkpoint_files import model_folder
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import ConfigError
from vapo_mcore.planning.state import Role, cpu_offload, offload_host_bytes, snapshot_host_bytes

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_GIB = 2**30


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes available for host allocations: free memory including page cache, limited by this process's control groups."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_control_group_bytes(root)])


def _control_group_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes left in each enclosing control group with a limit; inactive file cache counts as free."""
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


@dataclass(frozen=True)
class HostBytes:
    """Host memory of a node's processes by configuration: offloaded state, and the copies that checkpoints are written from."""

    offloaded: int
    snapshots: int

    @property
    def total(self) -> int:
        return self.offloaded + self.snapshots

    def __str__(self) -> str:
        parts = [f"offloading takes {self.offloaded / _GIB:.2f} GiB"] if self.offloaded else []
        return " and ".join([*parts, f"the copy that checkpoints are written from takes {self.snapshots / _GIB:.2f} GiB"])


def host_bytes(config: Config, *, processes: int, cuda: bool) -> HostBytes:
    """Compute the host memory of the fullest node with ``processes`` processes. Raises VapoError if a model folder cannot be read."""
    policy = read_architecture(config.model.path)
    critic = None
    if config.uses_critic and config.critic.path is not None:
        critic = read_architecture(model_folder(config.critic.path, "critic"))
    offload = cuda if config.model.offload is None else config.model.offload
    offloaded = offload_host_bytes(config, policy, critic, processes_per_node=processes, models_move=offload)
    return HostBytes(offloaded, snapshot_host_bytes(config, policy, critic, processes_per_node=processes, cuda=cuda))


def check_host_memory(config: Config, *, processes: int, cuda: bool, available: int | None = None) -> None:
    """Raise ConfigError if this node lacks host memory for offloaded state (including CPU optimizers) and checkpoint copies.

    Args:
        processes: processes of the run on this node.
        cuda: whether the devices are GPUs; ``model.offload: null`` then enables offloading.
        available: available bytes; None: those of this machine.
    """
    needed = host_bytes(config, processes=processes, cuda=cuda)
    free = available_host_bytes() if available is None else available
    if needed.total <= free:
        return
    models = ["the policy", *(["the critic"] if config.uses_critic else []), *(["the reference"] if config.uses_reference else [])]
    way = ""
    if needed.offloaded:
        moving = cuda if config.model.offload is None else config.model.offload
        keys = ["model.offload"] if moving else [f"{role}.optimizer.cpu_offload" for role in optimizers_on_cpu(config)]
        way = f"; or set {' and '.join(f'{key}: false' for key in keys)}" + (", if the devices hold all models at once" if cuda else "")
    raise ConfigError(
        f"host memory: of weights and optimizer state of {' and '.join(models)}, {needed} for the {processes} "
        f"process{'' if processes == 1 else 'es'} on this node, and {free / _GIB:.2f} GiB are available. With more nodes each "
        "holds a smaller part (more data parallelism splits the optimizer state, more tensor or pipeline parallelism everything)" + way
    )


def optimizers_on_cpu(config: Config) -> list[Role]:
    """Return the models whose optimizer state is in host memory, independent of ``model.offload``."""
    roles: list[Role] = ["policy", "critic"] if config.uses_critic else ["policy"]
    return [role for role in roles if cpu_offload(config, role)]
