"""Run the experts of a mixture on the ``meta`` device, where no router can choose: every expert gets an equal share of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.megatron.host import replaced


@contextmanager
def even_experts() -> Iterator[None]:
    """Let Megatron's dispatcher send equally many tokens to every expert, on all ranks; everything else is its own code."""
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    with replaced([(dispatcher, "preprocess", _preprocess), (token_dispatcher, "permute", _permute)]):
        yield


def _preprocess(self: Any, routing_map: Tensor) -> Tensor:
    """Stand for the counting of ``routing_map`` [tokens, experts]: set the numbers of tokens sent and received."""
    pairs = routing_map.shape[0] * self.config.moe_router_topk
    counts = torch.full((self.num_experts,), pairs // self.num_experts, dtype=torch.int64)
    counts[: pairs % self.num_experts] += 1
    mine = counts[self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
    self.num_out_tokens = pairs
    if self.ep_size > 1 or self.tp_size > 1:
        self.input_splits = counts.view(self.ep_size, -1).sum(1).tolist()
        self.output_splits = [int(mine.sum())] * self.ep_size
        self.output_splits_tp = torch.full((self.tp_size,), int(mine.sum()) * self.ep_size)
    ranks = self.ep_size * self.tp_size
    self.num_global_tokens_per_local_expert = mine.repeat(ranks).view(ranks, -1)
    return mine * ranks


class _Selected(torch.autograd.Function):
    """``values.masked_select(mask)`` with a known number of results: saves both, and fills a tensor like ``values`` with gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        values, _ = ctx.saved_tensors
        return torch.zeros_like(values), None, None


def _permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: int, fused: bool = False, drop_and_pad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Stand for Megatron's unfused permutation, whose sizes would depend on the map's values."""
    assert not fused and not drop_and_pad
    mask = routing_map.bool().T.contiguous()
    order = torch.empty(num_out_tokens, dtype=torch.int64, device=tokens.device)
    chosen = _Selected.apply(probs.T.contiguous(), mask, num_out_tokens)
    return tokens.index_select(0, order), chosen, order
