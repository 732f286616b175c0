"""Operations on packed sequences: lengths, per-response sums, broadcasts, placing rewards, statistics over ranks."""

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.moments_kernel import block_moments

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_packed(cu_seqlens: Tensor, mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` unless ``mask`` and every given tensor is 1-D ``[total]`` with ``cu_seqlens`` running from 0 to total."""
    total = mask.numel()
    for name, tensor in {"mask": mask, **tensors}.items():
        if tensor is not None and tuple(tensor.shape) != (total,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected one entry per token, [{total}] like the mask")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be a 1-D integer tensor [n + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != total or bool((cu_seqlens.diff() < 0).any()):
        given = f"{cu_seqlens[:8].tolist()} ... {int(cu_seqlens[-1])}"
        raise ValueError(f"cu_seqlens must rise from 0 to {total} (the number of tokens), got {given}")


def sequence_ids(cu_seqlens: Tensor) -> Tensor:
    """Return the index of the sequence each token belongs to, int64 ``[total]``."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def response_lengths(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Count the unmasked tokens of each response in integer arithmetic, int64 ``[n]``."""
    counts = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.bool(), 0, out=counts[1:])
    return counts[cu_seqlens.long()].diff()


def broadcast_to_tokens(per_response: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Expand one number per response to its unmasked tokens, 0 at masked ones: ``[n]`` -> ``[total]``."""
    spread = torch.repeat_interleave(per_response, cu_seqlens.diff().long())
    return torch.where(mask.bool(), spread, torch.zeros_like(spread))


def keep_responses(mask: Tensor, cu_seqlens: Tensor, keep: Tensor) -> Tensor:
    """Mask every token of the responses where ``keep`` (bool ``[n]``) is False.

    Used to exclude responses from the losses: overlong filtering (DAPO section 3.4), failed grading.
    """
    return mask.bool() & torch.repeat_interleave(keep.bool(), cu_seqlens.diff().long())


def last_unmasked(mask: Tensor) -> Tensor:
    """Return the index of the last unmasked token of the pack at or before each position, -1 if there is none; int64 ``[total]``."""
    positions = torch.arange(mask.numel(), device=mask.device)
    return torch.where(mask.bool(), positions, torch.full_like(positions, -1)).cummax(0).values if mask.numel() else positions


def place_terminal_rewards(per_response: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Place each response's reward on its last unmasked token, 0 elsewhere: ``[n]`` -> ``[total]``.

    If the last token is masked (filtered, rejected, trailing tool output), the reward goes to the last unmasked token before it. The
    reward of a response without unmasked tokens is dropped.
    """
    rewards = torch.zeros(mask.numel(), dtype=per_response.dtype, device=per_response.device)
    filled = response_lengths(mask, cu_seqlens) > 0
    ends = cu_seqlens[1:].long()[filled] - 1
    rewards[last_unmasked(mask)[ends]] = per_response[filled]
    return rewards


def place_rewards(amounts: Tensor, positions: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Place rewards of turns or steps, each on the last unmasked token at or before its position; ``[total]``.

    amounts: float [k]; positions: int64 [k], indices into the pack. Amounts on the same token are added. Raises ``ValueError`` if
    a response has no unmasked token at or before a position, rather than dropping that reward silently.
    """
    rewards = torch.zeros(mask.numel(), dtype=amounts.dtype, device=amounts.device)
    targets = last_unmasked(mask)[positions]
    starts = cu_seqlens[:-1].long()[sequence_ids(cu_seqlens)[positions]]
    if bool((targets < starts).any()):
        lost = positions[targets < starts].tolist()
        raise ValueError(f"no unmasked token of the same response at or before the rewarded positions {lost[:8]}")
    return rewards.index_add(0, targets, amounts)


def nonfinite_responses(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the indices of the responses with NaN or infinity at an unmasked token of ``x``, ascending; int64 ``[k]``."""
    bad = mask.bool() & ~torch.isfinite(x)
    return (response_lengths(bad, cu_seqlens) > 0).nonzero().flatten()


def all_reduce_sum(x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """All-reduce ``x`` in place with a sum over ``group``; None means this process alone. Every rank of the group must call it."""
    if group is not None:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def masked_moments(x: Tensor, mask: Tensor, group: "dist.ProcessGroup | None" = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``(count, mean, population variance)`` of ``x`` where ``mask``, over all ranks of ``group``; float64 scalars, 0 if empty.

    Squares are those of deviations from a mean, in float64, which avoids cancellation. The count is exact below 2**53. Takes one
    collective; a rank without tokens contributes zeros. Host tensors use the compiled loops of ``moments_kernel``, device tensors torch.
    """
    moments = _host_moments(x, mask.bool()) if x.device.type == "cpu" else _device_moments(x, mask.bool())
    if group is not None:
        ranks = moments.new_empty(dist.get_world_size(group) * 3)
        dist.all_gather_into_tensor(ranks, moments, group=group)
        moments = _union(*ranks.view(-1, 3).unbind(-1))
    count, total, squares = moments.unbind()
    return count, total / count.clamp(min=1.0), squares / count.clamp(min=1.0)


def _union(counts: Tensor, sums: Tensor, squares: Tensor) -> Tensor:
    """Combine count, sum and squared deviations from its own mean of each part, all [parts], to those of all parts, [3] (Chan et al. 1979).

    The squared deviations from the common mean are those from the part's mean plus count (part's mean - common mean)^2.
    """
    count, total = _sum(counts), _sum(sums)
    shifts = sums / counts.clamp(min=1.0) - total / count.clamp(min=1.0)
    return torch.stack([count, total, _sum(torch.cat([squares, counts * shifts.square()]))])


def _sum(x: Tensor) -> Tensor:
    """Return the sum; on the host rounded once, unless an entry is NaN or infinite (``math.fsum`` raises for opposite infinities)."""
    if x.device.type == "cpu" and bool(x.isfinite().all()):
        return x.new_tensor(math.fsum(x.tolist()))
    return x.sum()


def _host_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return this rank's count and sum of unmasked tokens and their squared deviations from this rank's mean, float64 [3]."""
    moments = block_moments(as_floats(x), mask.contiguous().numpy(), torch.get_num_threads())
    return _union(*torch.from_numpy(moments))


def _device_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the same as ``_host_moments`` on the device."""
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    clean = torch.where(mask, x.detach().double(), zero)
    count, total = mask.sum().double(), clean.sum()
    squares = torch.where(mask, (clean - total / count.clamp(min=1.0)).square(), zero).sum()
    return torch.stack([count, total, squares])


def as_floats(x: Tensor) -> "NDArray[np.floating]":
    """View a host tensor as a numpy array without a copy; dtypes that numpy or the kernels lack are converted to float64."""
    return (x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().double()).contiguous().numpy()
