"""Sample tokens from rows of logits with given uniform numbers; each row's token depends only on that row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vapo_mcore.rollout.base import GREEDY, SamplingConfig


def uniform_numbers(seeds: Sequence[int], count: int) -> Tensor:
    """Return float64 ``[len(seeds), count]`` in [0, 1): row i is the Philox stream with seed i as key, independent of the others."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def processed_logprobs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Compute the log-probs of the sampling distribution, float32 ``[n, vocab]``; -inf for tokens that cannot be sampled."""
    logits = logits.float()
    if sampling.temperature == GREEDY:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        # Keep a token if the more likely tokens have a total mass below top_p, that is, it and the less likely ones exceed 1 - top_p.
        dropped = ascending.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        dropped[:, -1] = False
        logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), float("-inf"))
    return logits.log_softmax(-1)


def draw(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Sample tokens int64 ``[n]`` by inverting each row's cumulative distribution at ``uniforms [n]``; also returns float32 log-probs."""
    logprobs = processed_logprobs(logits, sampling)
    if sampling.temperature == GREEDY:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
