"""Checksums of everything that an update changes: parameters and optimizer state of policy and critic."""

from __future__ import annotations

from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.megatron.model import Role
from vapo_mcore.megatron.roles import Models
from vapo_mcore.weights.checksums import tensor_checksum


def state_checksums(models: Models) -> dict[str, str]:
    """Name -> checksum of this rank's parameters and optimizer tensors; brings them to the device for as long as it takes."""
    with models.residency.all_resident():
        found = resident_checksums(models, "policy")
        return found if models.critic is None else found | resident_checksums(models, "critic")


def resident_checksums(models: Models, role: Role) -> dict[str, str]:
    """The same of one model, whose parameters and optimizer state are on the device."""
    model = models.policy if role == "policy" else models.critic
    assert model is not None, "the recipe has no critic"
    found = {
        f"{role} {number}.{name}": tensor_checksum(parameter)
        for number, chunk in enumerate(model.chunks)
        for name, parameter in chunk.named_parameters()
    }
    tensors = models.residency.offloaders[role].state_tensors()
    return found | {f"{role} optimizer {name}": tensor_checksum(tensor) for name, tensor in tensors}


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose checksums differ, or that are on one side only, on any rank, sorted. A collective."""
    mine = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return sorted({name for part in all_gather_objects(mine) for name in part})
