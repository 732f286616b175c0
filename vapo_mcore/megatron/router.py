"""Extend Megatron's top-k router: count its load, repeat given choices, also in recomputation, and add losses over the mini-batch.

Imports Megatron-Core, so other modules import it inside functions only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor


@dataclass(frozen=True)
class RouterTask:
    """One micro-batch of one router.

    ``real``: bool [local tokens], False at pads; ``choices``: [local tokens, topk] to repeat, or None; ``free``: bool [local tokens], True
    at tokens that have no choice to repeat and take their top-k, or None.
    """

    real: Tensor
    choices: Tensor | None
    free: Tensor | None = None


@dataclass(frozen=True)
class RouterLosses:
    """Auxiliary losses of one router, as sums over tokens of terms already divided by the mini-batch's denominators.

    ``balance``: float32 [experts], weight of each expert's probability (None: no balance loss); ``tokens``: real tokens of the mini-batch.
    """

    balance_coef: float
    z_coef: float
    balance: Tensor | None
    tokens: float


class Router(TopKRouter):
    """A router whose choices ``Routing`` records and replays.

    Recording and replaying are Megatron's ``RouterReplay``, with two differences. Megatron lists the instances of all models of the process
    in one table; here each model drives its own. Megatron repeats choices in a recomputation only if the caller announces every backward
    pass, which pipeline schedules interleave with forward passes; here the router knows a recomputation by its gradients and takes the
    micro-batch that has waited longest: schedules run the backward passes of a model chunk in the order of its forward passes.
    """

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.router_replay = RouterReplay()
        RouterReplay.global_router_replay_instances.remove(self.router_replay)
        self.recomputed = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )
        self.task: RouterTask | None = None
        self.waiting: deque[RouterTask] = deque()  # micro-batches that await their recomputation
        self.in_training = False
        self.aux: RouterLosses | None = None
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Set the sums over the real tokens of training passes to zero.

        ``load``: int64 [experts], tokens of each expert; ``tokens`` and ``changed``: tokens, and those whose own choice was another (both
        also of passes without gradients that repeat choices);
        ``losses``: float64 [2], balance loss and z-loss before their coefficients.
        """
        device = self.weight.device
        self.load = torch.zeros(self.config.num_moe_experts, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)

    def begin(self, *, training: bool, aux: RouterLosses | None) -> None:
        self.in_training, self.aux = training, aux
        self.waiting.clear()

    def end(self, microbatches: int) -> None:
        """End a pass. With a frozen trunk no recomputation happens; otherwise every micro-batch must have had its own."""
        assert len(self.waiting) in (0, microbatches), f"{len(self.waiting)} of {microbatches} micro-batches were not recomputed"
        self.task, self.aux, self.in_training = None, None, False
        self.waiting.clear()
        self.router_replay.clear_indices()
        self.router_replay.clear_router_replay_action()

    def routing(self, logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Route logits [local tokens, 1, experts] by the task's choices or the top-k: probabilities and map, [local tokens, experts]."""
        task = self.task
        if task is None:
            return super().routing(logits, *arguments, **named)
        again = self.recomputed and torch.is_grad_enabled()
        if again:
            task = self.waiting.popleft()
        elif self.recomputed and self.in_training:
            self.waiting.append(task)
        counts = not again and (self.in_training or task.choices is not None)
        self.router_replay.clear_indices()
        if task.choices is None:
            self.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
        else:
            choices, own = self._choices(logits, task)
            if counts:
                self.changed += ((choices.sort(-1).values != own.sort(-1).values).any(-1) & task.real).sum()
            self.router_replay.set_target_indices(choices)
            self.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        probs, routing_map = super().routing(self._with_losses(logits, task.real), *arguments, **named)
        if counts:
            self.load += (routing_map & task.real[:, None]).sum(0)
            self.tokens += task.real.sum()
        return probs, routing_map

    @torch.no_grad()
    def _choices(self, logits: Tensor, task: RouterTask) -> tuple[Tensor, Tensor]:
        """Return the experts to take and the top-k of the logits, int64 [local tokens, topk]; softmax keeps the order of the logits."""
        assert task.choices is not None
        own = logits.flatten(0, 1).topk(self.topk, dim=-1).indices
        given = task.choices.long()
        return given if task.free is None else torch.where(task.free[:, None], own, given), own

    @property
    def chosen(self) -> Tensor:
        """Experts of the last micro-batch, repeated or its own, int64 [local tokens, topk]."""
        repeated, recorded = self.router_replay.target_topk_idx, self.router_replay.get_recorded_indices()
        found = recorded if repeated is None else repeated
        assert found is not None, "the router has not run"
        return found

    def _with_losses(self, logits: Tensor, real: Tensor) -> Tensor:
        """Return the logits with the gradient of the auxiliary losses attached."""
        aux = self.aux
        if aux is None or not torch.is_grad_enabled():
            return logits
        scores = logits.flatten(0, 1).float()
        zero = scores.new_zeros(())
        balance = zero if aux.balance is None else torch.where(real, scores.softmax(-1) @ aux.balance, 0.0).sum()
        z_loss = torch.where(real, scores.logsumexp(-1).square(), 0.0).sum() / aux.tokens
        self.losses += torch.stack([balance, z_loss]).detach().double()
        return MoEAuxLossAutoScaler.apply(logits, aux.balance_coef * balance + aux.z_coef * z_loss)  # type: ignore[no-any-return]
