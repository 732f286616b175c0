"""Reject NaN and infinity at trained tokens."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vapo_mcore.algorithm.segments import nonfinite_responses
from vapo_mcore.errors import TrainingError


def check_finite(tensors: Mapping[str, Tensor], mask: Tensor, cu_seqlens: Tensor, response_ids: Sequence[str] | None = None) -> None:
    """Raise ``TrainingError`` naming every tensor and response with a NaN or infinity at an unmasked token.

    tensors: name -> float [total]; mask: bool [total]; response_ids: [n] names for the message (None: the indices in the pack).
    Masked positions may hold anything. Synchronises once per tensor: call it once on a whole batch, not per micro-batch.
    """
    faults = []
    for name, tensor in tensors.items():
        bad = nonfinite_responses(tensor, mask, cu_seqlens)
        if bad.numel() == 0:
            continue
        shown = [response_ids[i] if response_ids is not None else str(i) for i in bad[:5].tolist()]
        more = f" and {bad.numel() - len(shown)} more" if bad.numel() > len(shown) else ""
        first = int((mask.bool() & ~torch.isfinite(tensor)).nonzero()[0])
        faults.append(f"{name}: response {', '.join(shown)}{more} (first at packed token {first}: {float(tensor[first])})")
    if faults:
        raise TrainingError("NaN or infinity at response tokens, expected finite numbers:\n  " + "\n  ".join(faults))
