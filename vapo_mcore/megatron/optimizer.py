"""Megatron's distributed AdamW with learning-rate warmup; all ranks skip a faulty update together."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.megatron.host import HAS_CUDA, compute_device, counted_as_device, megatron_scope

if TYPE_CHECKING:
    from vapo_mcore.config.schema import OptimizerConfig


class Skipped(IntEnum):
    """Why an update was skipped; if ranks report different reasons, the largest one applies."""

    SPIKE = 1
    GRADIENT = 2
    LOSS = 3

    def __str__(self) -> str:
        return {1: "the loss is a spike", 2: "a gradient is not finite", 3: "the loss is not finite"}[self]


class Optimizer:
    """AdamW over DDP chunks, with its state sharded over data parallelism.

    The learning rate of update k, from 1, is ``lr * min(1, k / warmup_updates)``, never 0: Megatron's scheduler starts at 0, so it is
    advanced before the update. As in Megatron, weight decay applies to matrices but not to biases and norms.

    Attributes:
        unscheduled_updates: updates outside the schedule. They act as if their gradient had been part of the previous update (``_apart``),
            and advance AdamW's step counter, but not the schedule.
    """

    def __init__(self, chunks: list[Any], settings: OptimizerConfig, model_config: Any, warmup_updates: int) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.settings = settings
        self.unscheduled_updates = 0
        self._device = compute_device()
        self._gradient = "decoupled_grad" if settings.cpu_offload else "grad"  # attribute in which Megatron stores a parameter's gradient
        config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=model_config.bf16,
            params_dtype=model_config.params_dtype,
            use_distributed_optimizer=True,
            **(_CPU_OFFLOAD if settings.cpu_offload else {}),
        )
        with megatron_scope():
            if settings.cpu_offload:
                self.megatron = _build_offloaded(config, chunks)
            else:
                self.megatron = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
            self.scheduler = OptimizerParamScheduler(
                self.megatron,
                init_lr=0.0,
                max_lr=settings.lr,
                min_lr=settings.lr,
                lr_warmup_steps=warmup_updates,
                lr_decay_steps=max(1, warmup_updates + 1),
                lr_decay_style="constant",
                start_wd=settings.weight_decay,
                end_wd=settings.weight_decay,
                wd_incr_steps=1,
                wd_incr_style="constant",
            )

    @property
    def updates(self) -> int:
        """Number of scheduled updates so far, without skipped ones."""
        return int(self.scheduler.num_steps)

    @property
    def all_updates(self) -> int:
        """Number of updates within and outside the schedule, equal to AdamW's step counters."""
        return self.updates + self.unscheduled_updates

    def set_updates(self, updates: int, unscheduled: int = 0) -> None:
        """Continue after ``updates`` scheduled and ``unscheduled`` unscheduled updates: a checkpoint's."""
        self.scheduler.num_steps = 0
        self.scheduler.step(updates)
        self.unscheduled_updates = unscheduled

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last update (before any update: of the first)."""
        warmup = self.scheduler.lr_warmup_steps
        return float(self.settings.lr * min(1.0, max(1, self.updates) / warmup)) if warmup else float(self.settings.lr)

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def step(self, fault: Skipped | None = None, *, unscheduled_lr: float | None = None) -> tuple[float, Skipped | None]:
        """Apply one update from the gradients in the buffers, unless any rank reports a fault.

        Args:
            fault: a fault that this rank has already found in the loss.
            unscheduled_lr: learning rate of an update outside the schedule (None: the schedule's next update).

        Returns:
            (gradient norm before clipping, why the update was skipped or None). All ranks take the same decision; a skipped update
            leaves weights, moments and schedule of all ranks bitwise unchanged.
        """
        with megatron_scope():
            self.megatron.prepare_grads()
            norm = float(self.megatron.get_grad_norm())
            if fault is None and not (math.isfinite(norm) and self._gradients_are_finite()):
                fault = Skipped.GRADIENT
            agreed = self._agree(fault)
            if agreed is not None:
                return norm, agreed
            self._clip(norm)
            if unscheduled_lr is None:
                self.scheduler.step(1)
                self.megatron.step_with_ready_grads()
            else:
                with self._groups(lr=unscheduled_lr, weight_decay=0.0), self._apart():
                    self.megatron.step_with_ready_grads()
                self.unscheduled_updates += 1
        return norm, None

    def _gradients_are_finite(self) -> bool:
        """Return whether all gradients that this rank's update reads are finite.

        The gradient norm is not sufficient: it counts parameters replicated over tensor parallelism (norms, biases) on one rank only.
        """
        parameters = [parameter for one in self.megatron.chained_optimizers for parameter in one.get_parameters()]
        gradients = [gradient for parameter in parameters if (gradient := getattr(parameter, self._gradient, None)) is not None]
        if not gradients:
            return True
        largest = torch.stack(list(torch._foreach_norm(gradients, math.inf)))
        return bool(largest.isfinite().all())

    def _agree(self, fault: Skipped | None) -> Skipped | None:
        """Return the most severe fault of any rank. A collective over all ranks."""
        worst = torch.tensor(int(fault or 0), dtype=torch.int32, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        code = int(worst)
        return Skipped(code) if code else None

    @contextmanager
    def _groups(self, **settings: float) -> Iterator[None]:
        """Temporarily change settings of all parameter groups."""
        groups = self.megatron.param_groups
        before = [{name: group[name] for name in settings} for group in groups]
        for group in groups:
            group.update(settings)
        try:
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Run an update on its gradient g alone: saves the first moment m before, and sets it to m + (1 - beta1) g afterwards.

        AdamW is linear in the first moment, so this is what g adds to the update before when both gradients are summed. Without it, an
        update of a second loss would mostly repeat the first one's momentum: beta1 m + (1 - beta1) g. Needs a copy of the first moments.
        """
        kept = [(moment, moment.clone()) for moment in self._first_moments()]
        for moment, _ in kept:
            moment.zero_()
        try:
            yield
        finally:
            for moment, before in kept:
                moment.add_(before)

    def _first_moments(self) -> list[Tensor]:
        """Return this rank's first moments; none before the first update."""
        optimizers = [one.optimizer for one in self.megatron.chained_optimizers if not getattr(one, "is_stub_optimizer", False)]
        return [state["exp_avg"] for optimizer in optimizers for state in optimizer.state.values() if "exp_avg" in state]

    def _clip(self, norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        if self.settings.clip_grad <= 0:
            return
        for optimizer in self.megatron.chained_optimizers:
            if not getattr(optimizer, "is_stub_optimizer", False) and optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self.settings.clip_grad, norm, self.settings.cpu_offload)


_CPU_OFFLOAD: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "pin_cpu_grads": HAS_CUDA,
}


def _build_offloaded(config: Any, chunks: list[Any]) -> Any:
    """Build Megatron's distributed optimizer with its HybridDeviceOptimizer, entirely on the CPU.

    Main parameters, moments and copies of the gradients are in host memory. torch's fused AdamW runs on the CPU, and the new weights are
    copied into the shards of the parameter buffers.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    # The optimizer owns the main parameters and takes float32 gradients for bfloat16 parameters. Passing this to the constructor raises
    # TypeError without Transformer Engine, although it is not needed (0.16.1).
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    buffers = [buffer.param_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # no_grad: otherwise shards of float32 parameters are non-leaf views, which torch's optimizers reject
    with counted_as_device(buffers), torch.no_grad():
        built = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for inner in hybrid_optimizers(built):
        # Megatron's map of main parameters omits parameters that are float32 in the model (all, or a value head), so loading a
        # checkpoint or new weights would skip them.
        inner.param_to_fp32_param |= inner.gpu_params_map_cpu_copy
    gc.collect()  # Megatron builds it twice; the first one holds copies of all parameters in reference cycles
    return built


def hybrid_optimizers(megatron: Any) -> Iterator[Any]:
    """Yield this rank's CPU optimizers; none unless ``cpu_offload`` is set."""
    for one in megatron.chained_optimizers:
        if not getattr(one, "is_stub_optimizer", False) and is_hybrid(one.optimizer):
            yield one.optimizer


def is_hybrid(inner: Any) -> bool:
    """Return whether the inner optimizer is Megatron's CPU optimizer."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return isinstance(inner, HybridDeviceOptimizer)
