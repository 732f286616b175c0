"""Choose the tokens that lower the entropy most, for Clip-Cov and KL-Cov (arXiv:2505.22617): log-prob and advantage covary there.

The covariance of token i over the N unmasked tokens of a mini-batch is (log pi(y_i) - mean log pi) (A_i - mean A) (Eq. 10). Here pi is the
policy before the rollout's updates: these log-probs are known for the whole mini-batch before its first forward pass, so the choice
is the same however the mini-batch is split over micro-batches and ranks. The paper's code reads the current policy, micro-batch
by micro-batch; in the first update of a rollout both policies are the same.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.kl import LOG_RATIO_CLAMP, masked_difference
from vapo_mcore.algorithm.objectives import ratio_indicators
from vapo_mcore.algorithm.segments import masked_moments

_LOW_63 = (1 << 63) - 1


def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return float64 [T], (log pi_t - mean) (A_t - mean) over the unmasked tokens of all ranks of ``group``, 0 at masked ones (Eq. 10).

    logprobs, advantages: float [T], the mini-batch's tokens of this rank; mask: bool [T]. A collective over ``group``.
    """
    mask = mask.bool()
    centred = []
    for x in (logprobs, advantages):
        _, mean, _ = masked_moments(x, mask, group)
        centred.append(torch.where(mask, x.double() - mean, 0.0))
    return centred[0] * centred[1]


def chosen_count(fraction: float, tokens: int) -> int:
    """Return how many of a mini-batch's N tokens are chosen: floor(fraction N), at least 1."""
    return max(1, math.floor(fraction * tokens))


def largest(scores: Tensor, candidates: Tensor, keys: Tensor, count: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Mark the ``count`` candidates with the largest scores over all ranks of ``group`` (all, if there are fewer); bool [T].

    scores: float64 [T], finite at candidates; candidates: bool [T]; keys: int64 [T], unique over all ranks. Among equal scores the
    smaller key wins, so the choice does not depend on the layout. A collective over ``group``.
    """
    score, key = _first(scores[candidates], keys[candidates], count)
    world = dist.get_world_size(group) if group is not None else 1
    if world > 1:
        size = torch.tensor([score.numel()], device=scores.device)
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
        room = int(size)
        padded_score = score.new_full((room,), -math.inf)
        padded_key = key.new_full((room,), _LOW_63)
        padded_score[: score.numel()], padded_key[: key.numel()] = score, key
        all_scores = [torch.empty_like(padded_score) for _ in range(world)]
        all_keys = [torch.empty_like(padded_key) for _ in range(world)]
        dist.all_gather(all_scores, padded_score, group=group)
        dist.all_gather(all_keys, padded_key, group=group)
        score, key = torch.cat(all_scores), torch.cat(all_keys)
        score, key = _first(score[score > -math.inf], key[score > -math.inf], count)
    if not score.numel():
        return torch.zeros_like(candidates)
    return candidates & ((scores > score[-1]) | ((scores == score[-1]) & (keys <= key[-1])))


def _first(scores: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first ``count`` entries by descending score, then ascending key."""
    by_key = torch.argsort(keys)
    scores, keys = scores[by_key], keys[by_key]
    order = torch.argsort(scores, descending=True, stable=True)[:count]
    return scores[order], keys[order]


def token_keys(row_ids: Tensor, positions: Tensor) -> Tensor:
    """Return int64 [T], unique in a rollout, from row ids and positions in the row (int64 [T], below 2^31)."""
    return (row_ids.long() << 31) | positions.long()


def random_scores(keys: Tensor, seed: int) -> Tensor:
    """Hash key and seed to float64 [T] in [0, 1) (53 bits; splitmix64's finaliser), independent of the layout."""
    x = keys.long() + torch.tensor(seed & _LOW_63, device=keys.device)
    for multiplier, shift in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27)):
        x = (x ^ ((x >> shift) & (_LOW_63 >> (shift - 1)))) * multiplier
    x = x ^ ((x >> 31) & (_LOW_63 >> 30))
    return ((x >> 11) & ((1 << 53) - 1)).double() / 2.0**53


def covariance_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected: Tensor,
    *,
    kl_coef: float | None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the per-token terms of Clip-Cov (``kl_coef`` None; arXiv:2505.22617, Eq. 12) and KL-Cov (Eq. 14).

    term_t = -r_t A_t, r_t = exp(logp - logp_old), not clipped, log-ratio clamped to +-20. At ``selected`` tokens (bool [T]) the term is
    0 in Clip-Cov and -r_t A_t + kl_coef |logp_t - logp_old_t| in KL-Cov, as in the authors' code. Other arguments and indicators are those
    of ``policy_loss_terms``; ``importance_weights`` multiply the whole term.
    """
    mask = mask.bool()
    selected = selected.bool() & mask
    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    log_ratio = masked_difference(logprobs, old_logprobs.detach(), mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    terms = -log_ratio.exp() * torch.where(mask, advantages.detach(), zero)
    terms = torch.where(selected, zero if kl_coef is None else terms + kl_coef * log_ratio.abs(), terms)
    if importance_weights is not None:
        terms = terms * torch.where(mask, importance_weights.detach(), zero)
    return terms, ratio_indicators(logprobs, old_logprobs, mask)
