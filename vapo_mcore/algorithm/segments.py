"""Operations on packed sequences: lengths, per-response sums, broadcasts, placing rewards, statistics over ranks."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.moments_kernel import masked_square_sum, masked_sum

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_packed(cu_seqlens: Tensor, mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` unless ``mask`` and every given tensor is 1-D ``[total]`` with ``cu_seqlens`` running from 0 to total."""
    total = mask.numel()
    for name, tensor in {"mask": mask, **tensors}.items():
        if tensor is not None and tuple(tensor.shape) != (total,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; one entry a token, [{total}] like the mask, was expected")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be a 1-D integer tensor [n + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != total or bool((cu_seqlens.diff() < 0).any()):
        given = f"{cu_seqlens[:8].tolist()} ... {int(cu_seqlens[-1])}"
        raise ValueError(f"cu_seqlens must rise from 0 to {total} (the number of tokens), got {given}")


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """int64 ``[total]``: the index of the sequence each token belongs to."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def response_lengths(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 ``[n]``: unmasked tokens of each response (exact: integers throughout)."""
    counts = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.bool(), 0, out=counts[1:])
    return counts[cu_seqlens.long()].diff()


def broadcast_to_tokens(per_response: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``[total]``: each response's number at each of its unmasked tokens, 0 at masked ones."""
    spread = torch.repeat_interleave(per_response, cu_seqlens.diff().long())
    return torch.where(mask.bool(), spread, torch.zeros_like(spread))


def keep_responses(mask: Tensor, cu_seqlens: Tensor, keep: Tensor) -> Tensor:
    """The mask with every token of the responses where ``keep`` (bool ``[n]``) is False switched off.

    This is how a response leaves the losses: overlong filtering (DAPO section 3.4), a failed grading.
    """
    return mask.bool() & torch.repeat_interleave(keep.bool(), cu_seqlens.diff().long())


def last_unmasked(mask: Tensor) -> Tensor:
    """int64 ``[total]``: index of the last unmasked token at or before each position of the whole pack, -1 if there is none."""
    positions = torch.arange(mask.numel(), device=mask.device)
    return torch.where(mask.bool(), positions, torch.full_like(positions, -1)).cummax(0).values if mask.numel() else positions


def place_terminal_rewards(per_response: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``[total]``: each response's reward on its last unmasked token, 0 elsewhere.

    If the very last token is masked (a filtered or rejected one, a trailing tool output) the reward stands on the unmasked token
    before it and is not lost. A response without unmasked tokens gets none, whatever its reward is.
    """
    rewards = torch.zeros(mask.numel(), dtype=per_response.dtype, device=per_response.device)
    filled = response_lengths(mask, cu_seqlens) > 0
    ends = cu_seqlens[1:].long()[filled] - 1
    rewards[last_unmasked(mask)[ends]] = per_response[filled]
    return rewards


def place_rewards(amounts: Tensor, positions: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``[total]``: rewards earned at given tokens (turns or steps), each on the last unmasked token at or before its position.

    amounts: float [k]; positions: int64 [k], indices into the pack. Amounts that meet on one token are added. ``ValueError``
    if a response has no unmasked token at or before a position: that reward could teach nothing, and dropping it would hide it.
    """
    rewards = torch.zeros(mask.numel(), dtype=amounts.dtype, device=amounts.device)
    targets = last_unmasked(mask)[positions]
    starts = cu_seqlens[:-1].long()[sequence_ids(cu_seqlens)[positions]]
    if bool((targets < starts).any()):
        lost = positions[targets < starts].tolist()
        raise ValueError(f"no unmasked token of the same response at or before the rewarded positions {lost[:8]}")
    return rewards.index_add(0, targets, amounts)


def nonfinite_responses(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 ``[k]``: the responses with a NaN or infinity at an unmasked token of ``x``, in order."""
    bad = mask.bool() & ~torch.isfinite(x)
    return (response_lengths(bad, cu_seqlens) > 0).nonzero().flatten()


def all_reduce_sum(x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """Sum over ``group`` in place; None means this process alone. Collective: every rank of the group calls it."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def masked_moments(x: Tensor, mask: Tensor, group: "dist.ProcessGroup | None" = None) -> tuple[Tensor, Tensor, Tensor]:
    """``(count, mean, population variance)`` of ``x`` where ``mask``, over all ranks of ``group``; float64 scalars, 0 where empty.

    Two passes in float64 (mean first, then squared deviations): no cancellation. The count is exact below 2**53. Two reductions;
    a rank without tokens takes part with zeros. Host tensors go through compiled loops (``moments_kernel``), device tensors through
    torch.
    """
    mask = mask.bool()
    local, deviations = _host_sums(x, mask) if x.device.type == "cpu" else _device_sums(x, mask)
    count, total = all_reduce_sum(local, group)
    mean = total / count.clamp(min=1.0)
    squares = all_reduce_sum(deviations(mean), group)
    return count, mean, squares / count.clamp(min=1.0)


def _host_sums(x: Tensor, mask: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """float64 ``[count, sum]`` of the unmasked tokens of this rank, and their squared deviations from a given mean."""
    tokens, unmasked, threads = as_floats(x), mask.contiguous().numpy(), torch.get_num_threads()
    local = torch.tensor(masked_sum(tokens, unmasked, threads), dtype=torch.float64)
    return local, lambda mean: torch.tensor(masked_square_sum(tokens, unmasked, float(mean), threads), dtype=torch.float64)


def _device_sums(x: Tensor, mask: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """As ``_host_sums``, without leaving the device."""
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    clean = torch.where(mask, x.detach().double(), zero)
    return torch.stack([mask.sum().double(), clean.sum()]), lambda mean: torch.where(mask, (clean - mean).square(), zero).sum()


def as_floats(x: Tensor) -> "NDArray[np.floating]":
    """A host tensor as a numpy array without a copy; types that numpy or the kernels do not have become float64."""
    return (x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().double()).contiguous().numpy()
