"""Offload: ten rounds through all stages keep weights and optimizer state bit for bit and leave the same bytes on device and host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vapo_mcore.certify.batches import critic_batches
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.record import Measurement, fails, holds
from vapo_mcore.certify.state import differing, resident_checksums
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.megatron.losses import CriticLoss, SupervisedLoss
from vapo_mcore.megatron.model import Role
from vapo_mcore.megatron.offload import RESIDENCY, Stage
from vapo_mcore.megatron.roles import Models

CYCLES = 10
MOST_TRAINED = 32
"""Tokens of each of the two texts that create the moments, at most."""
UPDATED: Mapping[Stage, Role] = {"critic_update": "critic", "policy_update": "policy"}
"""The model that a stage updates."""


def run(bench: Bench) -> list[Measurement]:
    """Check with offloading enabled, even if the recipe disables it; an update with learning rate 0 creates the moments."""
    models = bench.models
    before = _after_updates(bench)
    with models.residency.always_enabled():
        on_device, host, allocated = _cycle(models)
        after = _signs_restored(models)
    return [_bits(before, after), _flat(on_device, host, allocated)]


def _after_updates(bench: Bench) -> dict[str, str]:
    """Update each model once and return the checksums of its state, taken before anything of it leaves the device.

    The update trains on the two texts of drawn token ids, in one pack; the values of the moments do not matter.
    """
    texts = [ids[-MOST_TRAINED:] for ids in bench.sequences[-2:]]
    with bench.on_device("policy_update") as models:
        batches = critic_batches(models.policy, bench.microbatches(texts, [[0, 1]]))
        batches = [batch.with_tensors(loss_weights=batch.tensors["value_weights"]) for batch in batches]
        models.policy.train_step(batches, SupervisedLoss(), unscheduled_lr=0.0)
        models.residency.mark_changed("policy")
        found = resident_checksums(models, "policy")
    if bench.models.critic is not None:
        with bench.on_device("critic_update") as models:
            assert models.critic is not None
            loss = CriticLoss(None, models.critic.architecture.value_bins)
            microbatches = bench.microbatches(texts, [[0, 1]], models.critic.parallel)
            models.critic.train_step(critic_batches(models.critic, microbatches), loss, unscheduled_lr=0.0)
            models.residency.mark_changed("critic")
            found |= resident_checksums(models, "critic")
    return found


def _cycle(models: Models) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Per cycle: bytes of model state on the device in each stage, bytes held on the host, and CUDA's allocated bytes at the end.

    Every other cycle flips the sign of every number during the update stages, five times in all, so that a lost change shows. In the other
    cycles nothing changes, and nothing is copied to the host.
    """
    residency = models.residency
    stages: tuple[Stage, ...] = (*RESIDENCY, "generate")
    on_device, host, allocated = [], [], []
    for cycle in range(CYCLES):
        bytes_by_stage = []
        for stage in stages:
            residency.enter(stage)
            bytes_by_stage.append(residency.device_bytes())
            role = UPDATED.get(stage)
            if cycle % 2 == 0 and role is not None and role in residency.offloaders:
                _change_signs(models, role)
        on_device.append(tuple(bytes_by_stage))
        host.append(residency.host_bytes())
        allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    return on_device, host, allocated


@torch.no_grad()
def _change_signs(models: Models, role: Role) -> None:
    """Negate a model's trained parameters and its optimizer's tensors, all of which are on the device."""
    offloader = models.residency.offloaders[role]
    for parameter in (parameter for chunk in offloader.model.chunks for parameter in chunk.parameters() if parameter.requires_grad):
        parameter.neg_()
    for _, tensor in offloader.state_tensors():
        tensor.neg_()
    models.residency.mark_changed(role)


def _signs_restored(models: Models) -> dict[str, str]:
    """Change the signs once more and return the checksums of the state, which must be what it was before the cycles."""
    found: dict[str, str] = {}
    for stage, role in UPDATED.items():
        if role in models.residency.offloaders:
            models.residency.enter(stage)
            _change_signs(models, role)
            found |= resident_checksums(models, role)
    models.residency.enter("generate")
    return found


def _bits(before: dict[str, str], after: dict[str, str]) -> Measurement:
    what, tolerance = f"weights and optimizer state after {CYCLES} cycles", "every bit"
    changed = differing(before, after)
    moments = sum("optimizer" in name and "main_param" not in name for name in before)
    if changed:
        remedy = "the copies on the host are not those that come back: look at the offloader and at page-locked memory"
        return fails(what, f"{len(changed)} tensors differ, the first is {changed[0]}", tolerance, remedy, len(changed))
    return holds(what, f"{len(before)} tensors, {moments} of them moments, are unchanged", tolerance, 0.0)


def _flat(on_device: list[tuple[int, ...]], host: list[int], allocated: list[int]) -> Measurement:
    what, tolerance = "bytes over the cycles", "the same in every cycle, nothing on the device while the engine generates"
    remedy = "something keeps memory at every move"
    # The first cycle makes the host buffers of what had never left the device.
    faults = []
    if len(set(on_device)) > 1:
        faults.append(f"on the device {sorted({max(row) for row in on_device})}")
    if len(set(host[1:])) > 1:
        faults.append(f"on the host {host}")
    if len(set(allocated[1:])) > 1:
        faults.append(f"allocated by CUDA {allocated}")
    if any(row[-1] for row in on_device):
        faults.append(f"{on_device[0][-1]} bytes stay on the device while the engine generates")
    merged = [text for part in all_gather_objects(faults) for text in part]
    if merged:
        return fails(what, "; ".join(merged[:3]), tolerance, remedy)
    return holds(what, f"at most {max(on_device[0]):,} on the device, {host[-1]:,} on the host of rank 0", tolerance, float(host[-1]))
