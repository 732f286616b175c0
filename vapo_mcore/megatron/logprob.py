"""Token log-probabilities and entropies over a vocabulary that is split across tensor-parallel ranks.

One autograd function serves both. Forward keeps no copy of the logits beyond what the output layer made; it works in
chunks of tokens in float32, so the full float32 [tokens, vocabulary] never exists. Backward writes one buffer in the
logits' own dtype, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23
"""float32 elements of a working chunk (32 MiB): tokens a chunk = this / local vocabulary, at least one."""


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label and, if asked, the entropy of each distribution.

    Args:
        logits: [tokens, local vocabulary], this rank's contiguous shard of the padded vocabulary, any float dtype.
        labels: int64 [tokens], global token ids, the same on all ranks of ``group``, below ``vocab_size``.
        vocab_size: real vocabulary; columns at or above it are padding and outside of the softmax.
        group: tensor-parallel group, None for a whole vocabulary.
        temperature: the distribution is softmax(logits / temperature).
        entropy: also return entropies (with a gradient of their own).

    Returns:
        (logprobs [tokens], entropies [tokens] or None), float32, the same on all ranks of ``group``.
    """
    logprobs, entropies = _VocabParallelLogprobs.apply(logits, labels, vocab_size, group, temperature, entropy, chunk_elements)
    return logprobs, entropies if entropy else None


def _scaled(logits: Tensor, scale: float) -> Tensor:
    """Logits over the temperature; scaled in float32, since a product rounded to bfloat16 would not be the distribution at T."""
    return logits if scale == 1.0 else logits.float() * scale


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: Any, temperature: float, entropy: bool, chunk_elements: int
    ) -> tuple[Tensor, Tensor]:
        tokens, local_vocab = logits.shape
        world, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        first = rank * local_vocab
        valid = max(0, min(local_vocab, vocab_size - first))
        real = logits.detach()[:, :valid]
        scale = 1.0 / temperature
        maximum = real.amax(dim=-1).float() * scale if valid else logits.new_full((tokens,), float("-inf"), dtype=torch.float32)
        if world > 1:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        local_label = labels - first
        owned = (local_label >= 0) & (local_label < valid)
        safe_label = torch.where(owned, local_label, 0)
        # rows: sum of exp, label's shifted logit, sum of exp * shifted logit
        sums = torch.zeros((3 if entropy else 2, tokens), dtype=torch.float32, device=logits.device)
        step = max(1, chunk_elements // max(1, local_vocab))
        for begin in range(0, tokens, step) if valid else ():
            part = slice(begin, begin + step)
            shifted = _scaled(real[part], scale) - maximum[part, None]
            sums[1, part] = torch.where(owned[part], shifted.gather(1, safe_label[part, None])[:, 0], 0.0)
            if entropy:
                weights = shifted.exp()
                sums[0, part] = weights.sum(-1)
                sums[2, part] = torch.linalg.vecdot(weights, shifted)
            else:
                sums[0, part] = shifted.exp_().sum(-1)
        if world > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        logprobs = sums[1] - log_sum
        entropies = log_sum - sums[2] / sums[0] if entropy else logprobs.new_zeros(())
        ctx.save_for_backward(logits, maximum + log_sum, safe_label, owned, entropies)
        ctx.valid, ctx.scale, ctx.step, ctx.entropy = valid, scale, step, entropy
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, log_normalizer, label, owned, entropies = ctx.saved_tensors
        valid, scale = ctx.valid, ctx.scale
        grad = torch.empty_like(logits)
        grad[:, valid:] = 0
        scaled = grad_logprobs * scale
        for begin in range(0, logits.shape[0], ctx.step) if valid else ():
            part = slice(begin, begin + ctx.step)
            # log-probabilities of the chunk, then (in place) probabilities: the one softmax buffer
            work = _scaled(logits[part, :valid], scale) - log_normalizer[part, None]
            if ctx.entropy:
                # dH/dz_j = -p_j (log p_j + H)
                slope = work + entropies[part, None]
                work.exp_()
                slope.mul_(grad_entropies[part, None] * scale).add_(scaled[part, None])
                work.mul_(slope).neg_()
            else:
                work.exp_().mul_(-scaled[part, None])
            rows = torch.arange(work.shape[0], device=work.device)
            work[rows, label[part]] += torch.where(owned[part], scaled[part], 0.0)
            grad[part, :valid] = work
        return grad, None, None, None, None, None, None
