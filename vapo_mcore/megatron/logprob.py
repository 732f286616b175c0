"""Token log-probabilities and entropies over a vocabulary that is split across tensor-parallel ranks.

One autograd function computes both, in chunks of tokens in float32, so the full float32 [tokens, vocabulary] is never materialised.
Forward saves one buffer in the logits' dtype, the softmax of this rank's shard; backward turns it into the gradient in place. The entry
of the label is computed from the float32 log-probability, because 1 - p would lose precision with a rounded p.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""float32 elements of a working chunk by device; a chunk has this / local vocabulary tokens, at least one. On CPU 2 MiB fit the cache (and
stay below the size at which malloc maps fresh zeroed pages for every allocation); a GPU is faster with fewer, larger kernels."""


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    excluded: Tensor | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probability of each label and, with ``entropy``, the entropy of each distribution.

    Args:
        logits: [tokens, local vocabulary], this rank's contiguous shard of the padded vocabulary, any float dtype.
        labels: int64 [tokens], global token ids, the same on all ranks of ``group``, below ``vocab_size``.
        vocab_size: unpadded vocabulary size; columns from it on are excluded from the softmax.
        group: tensor-parallel group, None for an unsharded vocabulary.
        temperature: the distribution is softmax(logits / temperature).
        entropy: also return entropies (differentiable).
        excluded: int64 [n], further columns of this shard, below ``vocab_size``, to exclude from the softmax (None: no columns).
        chunk_elements: elements of a working chunk, by default :data:`CHUNK_ELEMENTS`.

    Returns:
        (logprobs [tokens], entropies [tokens] or None), float32, the same on all ranks of ``group``.
    """
    chunk_elements = chunk_elements or CHUNK_ELEMENTS.get(logits.device.type, CHUNK_ELEMENTS["cuda"])
    keep = torch.is_grad_enabled() and logits.requires_grad
    logprobs, entropies = _VocabParallelLogprobs.apply(
        logits, labels, vocab_size, group, temperature, entropy, excluded, keep, chunk_elements
    )
    return logprobs, entropies if entropy else None


def _float_chunk(logits: Tensor, scale: float) -> Tensor:
    """Return the logits in float32 divided by the temperature (a view if they already are).

    Scales after the conversion: a product rounded to bfloat16 would change the distribution, and mixed-dtype arithmetic is slow on CPU.
    """
    return logits.float() if scale == 1.0 else logits.float() * scale


def _shard_stats(
    logits: Tensor,
    label: Tensor,
    owned: Tensor,
    excluded: Tensor | None,
    softmax: Tensor | None,
    scale: float,
    step: int,
    entropy: bool,
) -> Tensor:
    """Reduce a shard's logits [tokens, columns] to four numbers per token, in chunks of ``step`` tokens; writes ``softmax`` if given.

    Returns float32 [4, tokens]: the largest logit; then, of the logits minus it: logsumexp, the label's logit (very low where the label
    is not ``owned``), and with ``entropy`` their mean under the softmax.
    """
    tokens, columns = logits.shape
    stats = torch.full((4, tokens), _MASKED_LOGIT, dtype=torch.float32, device=logits.device)
    stats[3] = 0.0
    for begin in range(0, tokens, step) if columns else ():
        part = slice(begin, begin + step)
        chunk = _float_chunk(logits[part], scale)
        if excluded is not None:
            chunk = chunk.index_fill(1, excluded, _MASKED_LOGIT)
        top = chunk.amax(-1)
        shifted = chunk - top[:, None]
        probabilities = torch.softmax(shifted, -1)
        stats[0, part] = top
        stats[1, part] = -probabilities.amax(-1).log()  # the largest is exp(0) / sum
        stats[2, part] = torch.where(owned[part], shifted.gather(1, label[part, None])[:, 0], _MASKED_LOGIT)
        if entropy:
            stats[3, part] = torch.linalg.vecdot(probabilities, shifted)
        if softmax is not None:
            softmax[part, :columns] = probabilities
    return stats


class _VocabParallelLogprobs(torch.autograd.Function):
    """Computes the softmax over each rank's shard with torch's fused kernel and combines the shards by gathering four numbers per token.

    The probabilities of shard r are its local softmax times ``share``, the shard's fraction of the total mass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        group: Any,
        temperature: float,
        entropy: bool,
        excluded: Tensor | None,
        keep: bool,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        tokens, local_vocab = logits.shape
        world, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        first = rank * local_vocab
        valid = max(0, min(local_vocab, vocab_size - first))
        scale, step = 1.0 / temperature, max(1, chunk_elements // max(1, local_vocab))
        label = labels - first
        owned = (label >= 0) & (label < valid)
        if excluded is not None:
            owned &= ~torch.isin(label, excluded)
        label = torch.where(owned, label, 0)
        softmax = None
        if keep:
            softmax = torch.empty_like(logits)
            softmax[:, valid:] = 0
        stats = _shard_stats(logits.detach()[:, :valid], label, owned, excluded, softmax, scale, step, entropy)
        everyone = stats[None]
        if world > 1:
            everyone = stats.new_empty((world * 4, tokens))
            dist.all_gather_into_tensor(everyone, stats, group=group)
            everyone = everyone.view(world, 4, tokens)
        above = everyone[:, 0] - everyone[:, 0].amax(0)
        masses = above + everyone[:, 1]
        log_sum = masses.logsumexp(0)
        logprobs = (above + everyone[:, 2]).amax(0) - log_sum
        shares = (masses - log_sum).exp()
        entropies = log_sum - (shares * (everyone[:, 3] + above)).sum(0) if entropy else logprobs.new_zeros(())
        if keep:
            # Save the logits only for the entropy's gradient, which needs log p more precisely than the buffer holds it.
            log_normalizer = stats[0] - above[rank] + log_sum
            ctx.save_for_backward(softmax, label, owned, shares[rank], logprobs, entropies, *((logits, log_normalizer) if entropy else ()))
        ctx.valid, ctx.scale, ctx.step, ctx.used = valid, scale, step, False
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError("second backward pass: the first one overwrote the softmax with the gradient; run the forward pass again")
        ctx.used = True
        grad, label, owned, share, logprobs, entropies, *rest = ctx.saved_tensors
        tokens, valid = grad.shape[0], ctx.valid
        on_logprobs = torch.zeros_like(logprobs) if grad_logprobs is None else grad_logprobs * ctx.scale
        factors = -on_logprobs * share
        at_label = -on_logprobs * torch.expm1(logprobs)
        if grad_entropies is not None:
            # dH/dz_j = -p_j (log p_j + H) with log p_j + H = z_j - (log_normalizer - H): p_j times a line in z_j, one for each token
            logits, log_normalizer = rest
            on_entropies = grad_entropies * ctx.scale
            at_label = at_label - on_entropies * logprobs.exp() * (logprobs + entropies)
            slopes = -on_entropies * share
            factors = factors - slopes * (log_normalizer - entropies)
        for begin in range(0, tokens, ctx.step) if valid else ():
            part = slice(begin, begin + ctx.step)
            work = grad[part, :valid].float()  # a view where the buffer is float32
            if grad_entropies is None:
                work.mul_(factors[part, None])
            else:
                work.mul_(torch.addcmul(factors[part, None], _float_chunk(logits[part, :valid], ctx.scale), slopes[part, None]))
            if grad.dtype != torch.float32:
                grad[part, :valid] = work
        if valid:
            rows = torch.arange(tokens, device=grad.device)
            grad[rows, label] = torch.where(owned, at_label.to(grad.dtype), grad[rows, label])
        return grad, None, None, None, None, None, None, None, None


_MASKED_LOGIT = -1e30
"""Logit of an excluded column; finite, so that its probability is exactly 0 and never NaN."""
