"""Advantage estimators: packed (decoupled) GAE, group-relative, process-supervised and REINFORCE; whitening.

Sources: GAE, Schulman et al. 2015 (arXiv:1506.02438); decoupled GAE, VC-PPO (arXiv:2503.01491); length-adaptive GAE, VAPO
(arXiv:2504.05118); GRPO with outcome and process supervision, DeepSeekMath (arXiv:2402.03300); Dr. GRPO (arXiv:2503.20783); RLOO
(arXiv:2402.14740); REINFORCE++ (arXiv:2501.03262). Results carry no gradient.
"""

from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from vapo_mcore.algorithm import gae_kernel
from vapo_mcore.algorithm.lambdas import length_adaptive_lambda, sigmoid_lambda
from vapo_mcore.algorithm.moments_kernel import whitened
from vapo_mcore.algorithm.segments import as_floats, check_packed, masked_moments

__all__ = [
    "group_advantages",
    "length_adaptive_lambda",
    "normalised_step_rewards",
    "packed_gae",
    "packed_gae_decoupled",
    "reward_to_go",
    "rewards_of_own_and_later_steps",
    "sigmoid_lambda",
    "whiten",
]

GRPO_STD_EPS = 1e-6
WHITEN_EPS = 1e-8


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    lam: float | Tensor,
    gamma: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(advantages, returns)`` of GAE with one lambda (lam_policy = lam_critic = ``lam``), so returns = A + V."""
    return packed_gae_decoupled(rewards, values, mask, cu_seqlens, lam, lam, gamma, bootstrap)


@torch.no_grad()
def packed_gae_decoupled(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    lam_policy: float | Tensor,
    lam_critic: float | Tensor,
    gamma: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages with lambda_policy and returns with lambda_critic in one pass (VC-PPO's decoupled GAE).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma lambda A_{t+1};  R_t = A_t(lambda_critic) + V(s_t).
    Masked tokens inside a response (tool output) are skipped: they add no decay and no TD error, and V(s_{t+1}) is the value of the
    next unmasked token.

    rewards, values: float [total]; mask: bool [total]; cu_seqlens: int [n + 1]; lam_policy, lam_critic: float or float [n], in
    [0, 1]; gamma in [0, 1]; bootstrap: float [n], V of the state after the last response token (0 where the response finished), or
    None for 0 everywhere. Returns two tensors [total] in the dtype of ``values`` (float32 for 16-bit ones), 0 at masked positions.

    The recurrence runs in float64 on the CPU. Tensors on another device are copied to the host and the results back, which
    synchronises; at 17 bytes per token, a million tokens take a few milliseconds. Raises ``ValueError`` for wrong shapes and for
    lambda or gamma out of range. NaN at an unmasked token propagates; ``checks.check_finite`` reports it.
    """
    check_packed(cu_seqlens, mask, rewards=rewards, values=values)
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    num_sequences = cu_seqlens.numel() - 1
    dtype = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    advantages, returns = gae_kernel.gae(
        _to_numpy(rewards.to(dtype)),
        _to_numpy(values.to(dtype)),
        _to_numpy(mask.bool()),
        _to_numpy(cu_seqlens.long()),
        _lambda_array("lam_policy", lam_policy, num_sequences),
        _lambda_array("lam_critic", lam_critic, num_sequences),
        float(gamma),
        _bootstrap_array(bootstrap, num_sequences),
        torch.get_num_threads(),
    )
    return torch.from_numpy(advantages).to(values.device), torch.from_numpy(returns).to(values.device)


def reward_to_go(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """Compute the Monte-Carlo return of each token: sum_k gamma^k r_{t+k} [+ gamma^K bootstrap]; [total], 0 at masked positions.

    The sum runs over the unmasked tokens of the response. It equals GAE's return at lambda = 1 and needs no values. It is REINFORCE's
    advantage: with one terminal reward and gamma = 1 every token gets that reward. Whitened over the batch, with the KL penalty in the
    rewards, it is the advantage of REINFORCE++.
    """
    return packed_gae(rewards, torch.zeros_like(rewards), mask, cu_seqlens, 1.0, gamma, bootstrap)[0]


def group_advantages(scores: Tensor, groups: Tensor, kind: Literal["grpo", "dr_grpo", "rloo"], valid: Tensor | None = None) -> Tensor:
    """Compute the group-relative advantage of each response: [n], in the dtype of ``scores`` (float32 for integers).

    ``grpo``: (r - mean) / (population std + 1e-6) within the group (DeepSeekMath, section 4.1.2); ``dr_grpo``: r - mean; ``rloo``: r
    minus the mean of the others. A group of one gives 0 for every kind.

    scores: [n]; groups: int [n], any labels, in any order; valid: bool [n] or None. Invalid responses (grading failed) are excluded
    from the statistics and get 0; their score may be NaN.
    """
    scores = scores if scores.is_floating_point() else scores.float()
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    if not scores.shape == groups.shape == valid.shape or scores.dim() != 1:
        raise ValueError(f"scores {tuple(scores.shape)}, groups {tuple(groups.shape)} and valid {tuple(valid.shape)} must all be [n]")
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"kind must be grpo, dr_grpo or rloo, got {kind!r}")
    centred, std, count = _centre_in_groups(scores, groups, valid)
    if kind == "grpo":
        result = centred / (std + GRPO_STD_EPS)
    elif kind == "dr_grpo":
        result = centred
    else:  # r - (sum - r)/(n - 1) = (r - mean) n/(n - 1)
        result = centred * count / (count - 1).clamp(min=1.0)
    return torch.where(valid, result, torch.zeros_like(result)).to(scores.dtype)


def normalised_step_rewards(rewards: Tensor, labels: Tensor) -> Tensor:
    """Normalise step rewards: (reward - mean) / (population std + 1e-6) per label; float64 [k], 0 for a label with one step.

    rewards: float [k], the steps of many responses; labels: int [k], the group of each step's response (DeepSeekMath, section
    4.1.3), or one label for the whole batch.
    """
    centred, std, _ = _centre_in_groups(rewards, labels, torch.ones_like(rewards, dtype=torch.bool))
    return centred / (std + GRPO_STD_EPS)


def rewards_of_own_and_later_steps(normalised: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum the response's normalised step rewards from each unmasked token on; [total], 0 at masked tokens.

    The sum includes masked positions: a step may end on a masked token, and its reward still counts for the tokens before it.
    """
    advantages = reward_to_go(normalised, torch.ones_like(mask, dtype=torch.bool), cu_seqlens)
    return torch.where(mask.bool(), advantages, torch.zeros_like(advantages))


def whiten(x: Tensor, mask: Tensor, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """Whiten ``x`` over the unmasked tokens: (x - mean) / sqrt(var + 1e-8), 0 at masked positions; [total] in the dtype of ``x``.

    Uses the population variance, computed in float64. With ``group`` the statistics cover all its ranks, and every rank must call it,
    including ranks without tokens. Pass the group over which tokens are distinct (data parallel), not one that holds copies; None
    means this process alone. A single unmasked token gives exactly 0.
    """
    _, mean, variance = masked_moments(x, mask, group)
    deviation = (variance + WHITEN_EPS).sqrt()
    if x.device.type == "cpu":
        unmasked = mask.bool().contiguous().numpy()
        return torch.from_numpy(whitened(as_floats(x), unmasked, float(mean), float(deviation), torch.get_num_threads())).to(x.dtype)
    centred = torch.where(mask.bool(), x.detach().double() - mean, torch.zeros_like(mean))
    return (centred / deviation).to(x.dtype)


def _centre_in_groups(scores: Tensor, groups: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(score - group mean, group's population std, group size)`` of each entry, float64; only valid entries are counted."""
    labels, index = torch.unique(groups, return_inverse=True)
    weight = valid.double()
    clean = torch.where(valid, scores.detach().double(), torch.zeros_like(weight))
    zeros = torch.zeros(labels.numel(), dtype=torch.float64, device=scores.device)
    count = zeros.index_add(0, index, weight)
    centred = clean - (zeros.index_add(0, index, clean) / count.clamp(min=1.0))[index]
    variance = zeros.index_add(0, index, centred.square() * weight) / count.clamp(min=1.0)
    return centred, variance.sqrt()[index], count[index]


def _to_numpy(x: Tensor) -> NDArray:  # type: ignore[type-arg]
    return x.detach().cpu().contiguous().numpy()


def _lambda_array(name: str, lam: float | Tensor, num_sequences: int) -> NDArray[np.float64]:
    """Broadcast lambda to float64 [n]. Raises ``ValueError`` unless it is a scalar or [n], all in [0, 1]."""
    array = _to_numpy(torch.as_tensor(lam, dtype=torch.float64))
    if array.shape not in ((), (num_sequences,)):
        raise ValueError(f"{name} must be a number or [{num_sequences}], one per sequence; got shape {array.shape}")
    if not bool(np.all((array >= 0) & (array <= 1))):
        raise ValueError(f"{name} must lie in [0, 1]; got {array.min()} to {array.max()}")
    return np.ascontiguousarray(np.broadcast_to(array, (num_sequences,)))


def _bootstrap_array(bootstrap: Tensor | None, num_sequences: int) -> NDArray[np.float64]:
    if bootstrap is None:
        return np.zeros(num_sequences)
    if tuple(bootstrap.shape) != (num_sequences,):
        raise ValueError(f"bootstrap must be [{num_sequences}], one per sequence; got {tuple(bootstrap.shape)}")
    return _to_numpy(bootstrap.double())
