"""Offload: ten rounds through all stages keep weights and optimizer state bit for bit and leave the same bytes on device and host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vapo_mcore.certify.batches import critic_batches
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.record import Measurement, fails, holds
from vapo_mcore.certify.state import differing, state_checksums
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.losses import CriticLoss, SupervisedLoss
from vapo_mcore.megatron.offload import PARTS, RESIDENCY
from vapo_mcore.megatron.roles import Models

CYCLES = 10


def run(bench: Bench) -> list[Measurement]:
    """With offloading on, whatever the recipe says; moments exist after an update with a learning rate of 0."""
    models = bench.models
    _fill_moments(bench)
    before = state_checksums(models)
    with offloading(models):
        on_device, host, allocated = _cycle(models)
        after = state_checksums(models)
    return [_bits(before, after), _flat(on_device, host, allocated)]


@contextmanager
def offloading(models: Models) -> Iterator[None]:
    """Offload inside the block, whatever the recipe says. A recipe without offloading gets the memory of the host copies back."""
    residency = models.residency
    usual, residency.enabled = residency.enabled, True
    try:
        yield
    finally:
        residency.enabled = usual
        if not usual:
            for offloader in residency.offloaders.values():
                offloader.onload(PARTS)
                offloader.release_copies()


def _fill_moments(bench: Bench) -> None:
    """One update of each model, on the two texts of drawn token ids in one pack: what the moments hold does not matter."""
    microbatches = bench.microbatches(bench.sequences[-2:], [[0, 1]])

    def update(role: str, model: MegatronModel) -> None:
        if role == "critic":
            model.train_step(critic_batches(model, microbatches), CriticLoss(None, model.architecture.value_bins), unscheduled_lr=0.0)
        else:
            batches = [batch.with_tensors(loss_weights=batch.tensors["value_weights"]) for batch in critic_batches(model, microbatches)]
            model.train_step(batches, SupervisedLoss(), unscheduled_lr=0.0)
        bench.models.residency.mark_changed(role)

    with bench.on_device("policy_update") as models:
        update("policy", models.policy)
    if bench.models.critic is not None:
        with bench.on_device("critic_update") as models:
            assert models.critic is not None
            update("critic", models.critic)


def _cycle(models: Models) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Per cycle: bytes of model state on the device in each stage, bytes held on the host, and CUDA's allocated bytes at the end."""
    residency = models.residency
    on_device, host, allocated = [], [], []
    for _ in range(CYCLES):
        bytes_by_stage = []
        for stage in (*RESIDENCY, "generate"):
            residency.enter(stage)  # type: ignore[arg-type]
            bytes_by_stage.append(residency.device_bytes())
        on_device.append(tuple(bytes_by_stage))
        host.append(residency.host_bytes())
        allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    return on_device, host, allocated


def _bits(before: dict[str, str], after: dict[str, str]) -> Measurement:
    what, tolerance = f"weights and optimizer state after {CYCLES} cycles", "every bit"
    changed = differing(before, after)
    moments = sum("optimizer" in name and "main_param" not in name for name in before)
    if changed:
        remedy = "the copies on the host are not those that come back: look at the offloader and at page-locked memory"
        return fails(what, f"{len(changed)} tensors differ, the first is {changed[0]}", tolerance, remedy, len(changed))
    return holds(what, f"{len(before)} tensors, {moments} of them moments, are what they were", tolerance, 0.0)


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
    told = [text for part in all_gather_objects(faults) for text in part]
    if told:
        return fails(what, "; ".join(told[:3]), tolerance, remedy)
    return holds(what, f"at most {max(on_device[0]):,} on the device, {host[-1]:,} on the host of rank 0", tolerance, float(host[-1]))
