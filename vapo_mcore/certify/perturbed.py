"""The policy with other weights for a while, put back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vapo_mcore.certify.bench import Bench

STRENGTH = 0.05
"""Relative size of the change: the distributions become others, the model stays one that can be sampled."""


@contextmanager
def perturbed_policy(bench: Bench) -> Iterator[None]:
    """Change every weight w to w (1 + s sin(1000 w)) while the block runs.

    The change depends on the value alone, so replicated and tied tensors stay equal on all ranks whatever the layout.
    """
    residency = bench.models.residency
    offloader = residency.offloaders["policy"]
    if "sync" in bench.__dict__:
        bench.sync.put_to_sleep()
    residency.enter("sync")
    original = offloader.copy_params("certify_original")
    changed = [tensor.clone() for tensor in original]
    for tensor in changed:
        for piece in tensor.split(1 << 24):
            values = piece.float()
            piece.copy_(values * (1 + STRENGTH * torch.sin(1000 * values)))
    offloader.fill_params(changed)
    residency.mark_changed("policy")
    residency.enter("generate")
    try:
        yield
    finally:
        if "sync" in bench.__dict__:
            bench.sync.put_to_sleep()
        residency.enter("sync")
        offloader.fill_params(original)
        residency.mark_changed("policy")
        residency.enter("generate")
