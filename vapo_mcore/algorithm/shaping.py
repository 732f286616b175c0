"""Reward shaping: from the verifier's score to the training reward, by scaling, truncation factor, overlong penalty and KL penalty.

Shaping does not change the raw verdict, which decides whether a response is correct (positive-example loss, dynamic sampling).
``shape_rewards`` fixes the order.
"""

from typing import overload

import torch
from torch import Tensor

from vapo_mcore.algorithm.kl import KLKind, kl_estimate


def scale_reward(scores: Tensor, source: tuple[float, float], target: tuple[float, float]) -> Tensor:
    """Clamp ``scores`` to ``source`` = (low, high), then map that range linearly onto ``target``; same shape and dtype.

    ``source=(0, 1), target=(-1, 1)`` turns 1/0 verdicts into DAPO's +-1. Raises ``ValueError`` unless low < high in both ranges.
    """
    (source_low, source_high), (target_low, target_high) = source, target
    if not source_low < source_high or not target_low < target_high:
        raise ValueError(f"both ranges must have low < high, got source {source} and target {target}")
    fraction = (scores.clamp(source_low, source_high) - source_low) / (source_high - source_low)
    return target_low + fraction * (target_high - target_low)


@overload
def soft_overlong_penalty(length: int, max_length: int, cache: int, penalty: float = 1.0) -> float: ...
@overload
def soft_overlong_penalty(length: Tensor, max_length: int, cache: int, penalty: float = 1.0) -> Tensor: ...
def soft_overlong_penalty(length: int | Tensor, max_length: int, cache: int, penalty: float = 1.0) -> float | Tensor:
    """Compute DAPO's soft overlong punishment (Eq. 13): 0 up to max_length - cache, then linear to -penalty at max_length and above.

    length: response tokens, a number (returns a float) or a tensor (returns float32 of that shape). With ``cache`` 0 the penalty is a
    step above max_length. Raises ``ValueError`` unless 0 <= cache <= max_length and penalty >= 0.
    """
    if not 0 <= cache <= max_length or not penalty >= 0:
        raise ValueError(
            f"0 <= cache <= max_length and penalty >= 0 are required, got cache {cache}, max_length {max_length} and penalty {penalty}"
        )
    lengths = torch.as_tensor(length, dtype=torch.float64)
    if cache > 0:
        result = ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0) * penalty
    else:
        result = -(lengths > max_length).double() * penalty
    result = result + 0.0  # -0.0 to 0.0
    return result.float() if isinstance(length, Tensor) else float(result)


def scale_truncated(rewards: Tensor, truncated: Tensor, factor: float) -> Tensor:
    """Multiply the rewards of truncated responses with ``factor`` in [0, 1] (NeMo RL's ``stop_properly_penalty_coef``); [n].

    The factor lowers positive rewards and raises negative ones. Raises ``ValueError`` for a factor outside [0, 1].
    """
    if not 0.0 <= factor <= 1.0:
        raise ValueError(f"the factor on truncated responses must lie in [0, 1], got {factor}")
    return torch.where(truncated.bool(), rewards * factor, rewards)


def shape_rewards(
    scores: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    *,
    scale: tuple[tuple[float, float], tuple[float, float]] | None = None,
    truncated_factor: float | None = None,
    overlong: tuple[int, int, float] | None = None,
) -> Tensor:
    """Compute the reward of each response: scale, multiply truncated ones with the factor, add the overlong penalty; float32 [n].

    scores: float [n], the verifier's; lengths: int [n], response tokens; truncated: bool [n]; scale: (source, target) of
    ``scale_reward``; overlong: (max_length, cache, penalty) of ``soft_overlong_penalty``. None skips a part. The penalty is added last:
    truncated responses are the long ones, and the factor must not shrink their penalty.
    """
    rewards = scores.float()
    if scale is not None:
        rewards = scale_reward(rewards, *scale)
    if truncated_factor is not None:
        rewards = scale_truncated(rewards, truncated, truncated_factor)
    if overlong is not None:
        rewards = rewards + soft_overlong_penalty(lengths, *overlong).to(rewards.device)
    return rewards


@torch.no_grad()
def kl_penalised_rewards(
    rewards: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: KLKind,
    coef: float,
    clamp: float | None = None,
) -> Tensor:
    """Compute rewards - coef * KL estimate (within +-clamp) at each unmasked token (``kl.place: reward``); [total], 0 at masked tokens.

    Uses ``old_logprobs``, so the penalty is constant within a rollout. Advantages and the critic's returns are both computed from the
    penalised rewards.
    """
    mask = mask.bool()
    clean = torch.where(mask, rewards, torch.zeros_like(rewards))
    return clean - coef * kl_estimate(old_logprobs, reference_logprobs, kind, mask, clamp)
