"""From the verifier's score to the rewards that are trained on: scaling, cut responses, overlong punishment, KL penalty.

Shaping never touches the verdict: whether a response is correct (positive-example loss, dynamic sampling) is the raw verdict's
business. The order is fixed by ``shape_rewards``.
"""

from typing import overload

import torch
from torch import Tensor

from vapo_mcore.algorithm.kl import KLKind, kl_estimate


def scale_reward(scores: Tensor, source: tuple[float, float], target: tuple[float, float]) -> Tensor:
    """Clamp ``scores`` to ``source`` = (low, high), then map that range linearly onto ``target``; same shape and dtype.

    ``source=(0, 1), target=(-1, 1)`` turns 1/0 verdicts into DAPO's +-1. ``ValueError`` unless both ranges rise.
    """
    (source_low, source_high), (target_low, target_high) = source, target
    if not source_low < source_high or not target_low < target_high:
        raise ValueError(f"both ranges must rise (low < high), got source {source} and target {target}")
    fraction = (scores.clamp(source_low, source_high) - source_low) / (source_high - source_low)
    return target_low + fraction * (target_high - target_low)


@overload
def soft_overlong_penalty(length: int, max_length: int, cache: int, penalty: float = 1.0) -> float: ...
@overload
def soft_overlong_penalty(length: Tensor, max_length: int, cache: int, penalty: float = 1.0) -> Tensor: ...
def soft_overlong_penalty(length: int | Tensor, max_length: int, cache: int, penalty: float = 1.0) -> float | Tensor:
    """DAPO's soft overlong punishment (Eq. 13): 0 up to max_length - cache, then linear to -penalty at max_length, and no lower.

    length: response tokens, a number (gives a float) or a tensor (gives float32 of that shape). With ``cache`` 0 the penalty is a
    step above max_length. ``ValueError`` unless 0 <= cache <= max_length and penalty >= 0.
    """
    if not 0 <= cache <= max_length or not penalty >= 0:
        raise ValueError(f"0 <= cache <= max_length and penalty >= 0 are required, got {cache}, {max_length} and {penalty}")
    lengths = torch.as_tensor(length, dtype=torch.float64)
    if cache > 0:
        result = ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0) * penalty
    else:
        result = -(lengths > max_length).double() * penalty
    result = result + 0.0  # -0.0 to 0.0
    return result.float() if isinstance(length, Tensor) else float(result)


def scale_truncated(rewards: Tensor, truncated: Tensor, factor: float) -> Tensor:
    """Rewards of cut responses times ``factor`` in [0, 1] (NeMo RL's ``stop_properly_penalty_coef``); [n].

    It is a factor: it takes from positive rewards and forgives negative ones. ``ValueError`` for a factor outside [0, 1].
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
    """The reward of each response: scale, then the factor on cut ones, then the overlong punishment is added; float32 [n].

    scores: float [n], the verifier's; lengths: int [n], response tokens; truncated: bool [n]; scale: (source, target) of
    ``scale_reward``; overlong: (max_length, cache, penalty) of ``soft_overlong_penalty``. None leaves a part out. The punishment
    comes last so that a factor on cut responses, which are the long ones, cannot take it away.
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
    """rewards - coef * KL estimate (within +-clamp) at each unmasked token (``kl.place: reward``); [total], 0 at masked tokens.

    From ``old_logprobs``, so it is a constant of the rollout. What it returns goes into the critic's returns as well as into the
    advantages: both are computed from these rewards.
    """
    mask = mask.bool()
    clean = torch.where(mask, rewards, torch.zeros_like(rewards))
    return clean - coef * kl_estimate(old_logprobs, reference_logprobs, kind, mask, clamp)
