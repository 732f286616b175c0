"""Route a mixture of experts: record the experts of every token, replay them in another pass, and measure the load.

Choices are token-aligned tensors ``[tokens, layers of this pipeline rank, topk]``: they belong to the input of a position, so unlike labels
they are not shifted. They are packed like all other tensors of a micro-batch, so another plan of micro-batches packs them again.
A micro-batch has those of a pass of the trainer, or those of the rollout engine, which has none of the last token of a sequence: that token
takes its top-k. No log-prob depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture, choice_bytes
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron.parallel import ParallelContext

_DTYPES = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class RouterCoefs:
    """Coefficients of the auxiliary losses: balance loss and z-loss, each summed over the layers."""

    balance: float = 0.0
    z: float = 0.0

    def __bool__(self) -> bool:
        return self.balance > 0 or self.z > 0


@dataclass(frozen=True)
class RoutingStatistics:
    """Sums over all ranks and updates since the last reset; the same on all ranks.

    ``load``: float64 [layers, experts], tokens of each expert; ``tokens``: of one layer; ``changed``: (token, layer) pairs whose own choice
    was not the replayed one; ``balance``, ``z``: auxiliary losses before their coefficients, summed over layers and updates.
    Updates count, and passes that repeat choices.
    """

    load: Tensor
    tokens: float
    changed: float
    balance: float
    z: float


def local_choices(choices: Tensor, layout: ThdLayout, experts: int) -> Tensor:
    """Lay out packed choices [tokens, layers, topk] for this context-parallel rank: [local tokens, layers, topk].

    Pads too must reach ``topk`` different experts; they are spread over all of them.
    """
    mask, topk = layout.local_token_mask, choices.shape[2]
    first = torch.arange(mask.numel(), device=mask.device)[:, None] * topk
    spread = ((first + torch.arange(topk, device=mask.device)) % experts).to(choices.dtype)
    return torch.where(mask[:, None, None], layout.shard(choices, 0), spread[:, None])


def expert_load(choices: Tensor, experts: int) -> Tensor:
    """Count the tokens of each expert in choices [tokens, layers, topk]: int64 [layers, experts]."""
    layers = choices.shape[1]
    table = torch.arange(layers, device=choices.device)[:, None] * experts + choices.long()
    return torch.bincount(table.flatten(), minlength=layers * experts).view(layers, experts)


class Routing:
    """Drives the routers of one model on this rank.

    Args:
        chunks: the model's chunks; every layer is a mixture.
        choices_name: name of the micro-batch tensor with choices to replay.
    """

    def __init__(self, chunks: Sequence[Any], architecture: ModelArchitecture, parallel: ParallelContext, choices_name: str) -> None:
        from vapo_mcore.megatron.router import Router

        self.chunks = [[module for module in chunk.modules() if isinstance(module, Router)] for chunk in chunks]
        self.routers = [router for routers in self.chunks for router in routers]
        assert self.routers, "a mixture has routers on every pipeline rank"
        assert architecture.num_experts is not None and architecture.num_experts_per_token is not None
        self.experts, self.topk = architecture.num_experts, architecture.num_experts_per_token
        self.dtype = _DTYPES[choice_bytes(architecture.num_experts)]
        self.parallel, self.choices_name = parallel, choices_name
        self._recorded: dict[int, list[Tensor]] | None = None
        self.reset_statistics()  # on the device: Megatron builds routers on the host

    # ------------------------------------------------------------------ a pass

    @contextmanager
    def model_pass(
        self, microbatches: Sequence[MicroBatch], *, training: bool, record: bool = False, coefs: RouterCoefs | None = None
    ) -> Iterator[None]:
        """Run the routers for a pass of the model over ``microbatches``, with auxiliary losses if ``coefs`` are given; collective then."""
        losses = self._losses(microbatches, coefs) if coefs else [None] * len(self.routers)
        for router, aux in zip(self.routers, losses, strict=True):
            router.begin(training=training, aux=aux)
        self._recorded = {} if record else None
        yield
        for router in self.routers:
            router.end(len(microbatches))

    @property
    def layers(self) -> list[int]:
        """Layers of this rank's routers, numbered from 0 over the whole model."""
        return [router.layer_number - 1 for router in self.routers]

    @contextmanager
    def chunk_pass(self, chunk: int, microbatch: MicroBatch, number: int) -> Iterator[None]:
        """Give the routers of one chunk their tasks for the forward pass of one micro-batch, and keep their choices."""
        from vapo_mcore.megatron.router import RouterTask

        routers = self.chunks[chunk]
        real = self._mine(microbatch.layout.local_token_mask)
        choices = free = None
        name = self.choices_name if self.choices_name in microbatch.tensors else ENGINE_CHOICES
        if name in microbatch.tensors:
            first = sum(len(before) for before in self.chunks[:chunk])
            packed = microbatch.tensors[name]
            assert packed.shape[1:] == (len(self.routers), self.topk), f"choices {list(packed.shape)} of {len(self.routers)} layers"
            choices = self._mine(local_choices(packed[:, first : first + len(routers)], microbatch.layout, self.experts))
            if name == ENGINE_CHOICES:
                last = torch.zeros(packed.shape[0], dtype=torch.bool, device=packed.device)
                last[microbatch.layout.last_token_index] = True
                free = self._mine(microbatch.layout.shard(last, False))
        for layer, router in enumerate(routers):
            router.task = RouterTask(real, None if choices is None else choices[:, layer], free)
        yield
        if self._recorded is not None:
            chosen = torch.stack([router.chosen for router in routers], dim=1)
            self._recorded.setdefault(number, []).append(chosen.to(self.dtype))

    def recorded(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the choices of the last pass on the host, [tokens, layers of this rank, topk] per micro-batch. Collective over TP x CP."""
        assert self._recorded is not None, "the pass did not record"
        result = []
        for number, microbatch in enumerate(microbatches):
            local = torch.cat(self._recorded.pop(number), dim=1)
            sent = local.contiguous().view(torch.uint8)  # gloo does not send int16
            if self.parallel.sequence_parallel:
                parts = [torch.empty_like(sent) for _ in range(self.parallel.tensor_model_parallel_size)]
                dist.all_gather(parts, sent, group=self.parallel.tensor_model_parallel_group)
                sent = torch.cat(parts)
            packed = microbatch.layout.gather(sent, self.parallel.context_parallel_group)
            result.append(packed.view(self.dtype).cpu())
        self._recorded = None
        return result

    def _mine(self, local: Tensor) -> Tensor:
        """Return this tensor-parallel rank's part of [local tokens, ...] under sequence parallelism."""
        if not self.parallel.sequence_parallel:
            return local
        return local.chunk(self.parallel.tensor_model_parallel_size)[self.parallel.tensor_model_parallel_rank]

    # ------------------------------------------------------------------ losses

    def _losses(self, microbatches: Sequence[MicroBatch], coefs: RouterCoefs) -> list[Any]:
        """Return the auxiliary losses of each router. Collective over data parallelism.

        The balance loss of a layer is E sum_i f_i P_i: f_i the share of the mini-batch's (token, expert) pairs with expert i, P_i its mean
        probability. With f_i known before the pass, it is a sum over tokens, whatever micro-batches and ranks they are on.
        """
        from vapo_mcore.megatron.router import RouterLosses

        replayed = all(self.choices_name in microbatch.tensors for microbatch in microbatches)
        assert replayed or coefs.balance == 0, "the balance loss needs the choices of the whole mini-batch before its passes"
        load = torch.zeros(len(self.routers), self.experts, dtype=torch.float64, device=self.parallel.device)
        tokens = torch.tensor(float(sum(m.layout.num_tokens for m in microbatches)), dtype=torch.float64, device=self.parallel.device)
        for microbatch in microbatches if coefs.balance > 0 else ():
            load += expert_load(microbatch.tensors[self.choices_name], self.experts)
        if self.parallel.data_parallel_size > 1:
            dist.all_reduce(load, group=self.parallel.data_parallel_group)
            dist.all_reduce(tokens, group=self.parallel.data_parallel_group)
        count = max(1.0, float(tokens))
        weights = (load * (self.experts / (self.topk * count**2))).float()
        return [RouterLosses(coefs.balance, coefs.z, weight if coefs.balance > 0 else None, count) for weight in weights]

    # -------------------------------------------------------------- statistics

    def reset_statistics(self) -> None:
        for router in self.routers:
            router.reset_statistics()

    def statistics(self) -> RoutingStatistics:
        """Return the statistics of the training passes since the last reset. Collective over all ranks.

        Asserts that each real token reached ``topk`` experts in every layer: none was dropped.
        """
        parallel = self.parallel
        counts = [torch.stack([router.tokens, router.changed]) for router in self.routers]
        rows = [torch.cat([r.load.double(), count.double(), r.losses]) for r, count in zip(self.routers, counts, strict=True)]
        table = torch.stack(rows)
        if parallel.sequence_parallel:
            dist.all_reduce(table, group=parallel.tensor_model_parallel_group)
        dist.all_reduce(table, group=parallel.data_context_parallel_group)
        if parallel.pipeline_model_parallel_size > 1:
            parts = [torch.empty_like(table) for _ in range(parallel.pipeline_model_parallel_size)]
            dist.all_gather(parts, table, group=parallel.pipeline_model_parallel_group)
            table = torch.cat(parts)
        load, (tokens, changed, balance, z) = table[:, : self.experts].cpu(), table[:, self.experts :].T.cpu()
        assert torch.equal(load.sum(1), tokens * self.topk), "a token did not reach all its experts"
        return RoutingStatistics(load, float(tokens[0]), float(changed.sum()), float(balance.sum()), float(z.sum()))
