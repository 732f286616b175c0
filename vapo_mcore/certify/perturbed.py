"""The policy with other weights for a while, put back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vapo_mcore.certify.bench import Bench

STRENGTH = 0.05
"""Relative size of the change: the distributions become others, the model stays one that can be sampled."""
_ORIGINAL = "certify_original"


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
    original = offloader.copy_params(_ORIGINAL)
    with torch.no_grad():
        parameters = (parameter for chunk in bench.models.policy.chunks for parameter in chunk.parameters())
        for parameter in (parameter for parameter in parameters if parameter.requires_grad):
            for piece in parameter.detach().view(-1).split(1 << 24):
                values = piece.float()
                piece.copy_(values * (1 + STRENGTH * torch.sin(1000 * values)))
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
        residency.pool.release("policy", _ORIGINAL)
