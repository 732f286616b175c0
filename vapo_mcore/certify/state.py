"""Checksums of everything that an update changes: parameters and optimizer state of policy and critic."""

from __future__ import annotations

from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.megatron.roles import Models
from vapo_mcore.weights.checksums import tensor_checksum


def state_checksums(models: Models) -> dict[str, str]:
    """Name -> checksum of this rank's parameters and optimizer tensors; brings them to the device for as long as it takes."""
    found: dict[str, str] = {}
    present = {"policy": models.policy} | ({} if models.critic is None else {"critic": models.critic})
    with models.residency.all_resident():
        for role, model in present.items():
            for number, chunk in enumerate(model.chunks):
                found |= {f"{role} {number}.{name}": tensor_checksum(parameter) for name, parameter in chunk.named_parameters()}
            tensors = models.residency.offloaders[role].state_tensors()
            found |= {f"{role} optimizer {name}": tensor_checksum(tensor) for name, tensor in tensors}
    return found


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose checksums differ, or that are on one side only, on any rank, sorted. A collective."""
    mine = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return sorted({name for part in all_gather_objects(mine) for name in part})
