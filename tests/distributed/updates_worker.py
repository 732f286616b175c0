"""Worker of test_updates.py on two data-parallel ranks: learning rates, skipped steps, orders of epochs. Prints one JSON line.

    updates_worker.py FOLDER

FOLDER is a model of the layouts' problem.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "layouts"))
import problem
import small_models
import torch
import torch.distributed as dist
import worker as layouts
from torch import Tensor

from vapo_mcore.config.architecture import ValueBins
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.errors import StepBroken
from vapo_mcore.megatron.engine import MegatronModel, StepResult
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed
from vapo_mcore.records.metric_table import metrics_of
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.updates import require_returns_within

FOLDER = Path(sys.argv[1])
WARMUP = 4


class SpoiltLoss(layouts.PolicyTestLoss):
    """The policy's loss, infinite on the second rank alone."""

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = super().__call__(outputs, batch)
        return loss * (math.inf if dist.get_rank() == 1 else 1.0), stats


def build(role: str, parallel: ParallelContext, warmup_updates: int = 0) -> MegatronModel:
    return small_models.build(role, FOLDER, "float32", parallel, layouts.OPTIMIZER, warmup_updates=warmup_updates)


def weights(*models: MegatronModel) -> list[Tensor]:
    return [parameter.detach().clone() for model in models for chunk in model.chunks for parameter in chunk.parameters()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def step(model: MegatronModel, batches: list[MicroBatch], *, spoilt: bool = False) -> StepResult:
    if model.role == "critic":
        return model.train_step(batches, layouts.ValueTestLoss())
    return model.train_step(batches, SpoiltLoss() if spoilt else layouts.PolicyTestLoss())


def warm_up(parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """Rates as reported and as AdamW used them, in shares of the peak."""
    model = build("policy", parallel, WARMUP)
    assert model.optimizer is not None
    before, reported, used = weights(model), [], []
    for number in range(WARMUP + 2):
        reported.append(step(model, batches).learning_rate / layouts.LR)
        used.append(sorted({group["lr"] / layouts.LR for group in model.optimizer.megatron.param_groups}))
        if number == 0:
            largest = max(float((x - y).abs().max()) for x, y in zip(before, weights(model), strict=True))
    return {"reported": reported, "used": used, "first_change": largest / layouts.LR}


def one_rank_is_not_finite(parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    model, undisturbed = build("policy", parallel, WARMUP), build("policy", parallel, WARMUP)
    assert model.optimizer is not None
    assert undisturbed.optimizer is not None
    step(model, batches)
    before = weights(model)
    bad = step(model, batches, spoilt=True)
    unchanged = equal(before, weights(model))
    good = step(model, batches)
    for _ in range(2):
        expected = step(undisturbed, batches)
    mine = {
        "skipped": [bad.skipped is not None, good.skipped is not None],
        "norm_is_finite": math.isfinite(bad.grad_norm),
        "unchanged": unchanged,
        "as_if_it_had_not_been": equal(weights(model), weights(undisturbed)),
        "rates": [good.learning_rate / layouts.LR, expected.learning_rate / layouts.LR],
        "updates": [model.optimizer.updates, undisturbed.optimizer.updates],
    }
    ranks: list[dict[str, Any]] = [{}, {}]
    dist.all_gather_object(ranks, mine)
    return {"ranks": ranks}


def orders_of_epochs(parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """Two epochs of both models, the critic's first or one epoch of each in turn."""
    after = []
    for order in (("critic", "critic", "policy", "policy"), ("critic", "policy", "critic", "policy")):
        models = {role: build(role, parallel) for role in ("critic", "policy")}
        before = weights(*models.values())
        for role in order:
            step(models[role], batches)
        after.append(weights(*models.values()))
        assert not equal(before, after[-1])
    return {"equal": equal(*after)}


class ScaledLoss(layouts.ValueTestLoss):
    """The critic's loss times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = super().__call__(outputs, batch)
        return loss * self.factor, stats


def update_outside_the_schedule(parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """With the optimizer on the device and on the host."""
    return {name: _update_outside(parallel, batches, cpu_offload) for name, cpu_offload in (("device", False), ("host", True))}


def _update_outside(parallel: ParallelContext, batches: list[MicroBatch], cpu_offload: bool) -> dict[str, Any]:
    """An update on another loss between ordinary ones, whose momentum it must neither repeat nor let decay.

    Its gradient, opposite to theirs, is read from the first moment; weights and second moment are worked out from it in float64.
    """
    optimizer = layouts.OPTIMIZER.model_copy(update={"cpu_offload": cpu_offload})
    model = small_models.build("critic", FOLDER, "float32", parallel, optimizer, warmup_updates=0)
    assert model.optimizer is not None
    for _ in range(3):
        model.train_step(batches, ScaledLoss(1.0))

    def state() -> list[tuple[Tensor, Tensor, Tensor]]:
        (inner,) = [one.optimizer for one in model.optimizer.megatron.chained_optimizers]
        return [
            (p.detach().double(), found["exp_avg"].double(), found["exp_avg_sq"].double()) for p, found in inner.state.items() if p.numel()
        ]

    before = state()
    weighed = weights(model)
    model.train_step(batches, ScaledLoss(0.0), unscheduled_lr=0.01)
    unmoved = equal(weighed, weights(model)) and all(torch.equal(x[1], y[1]) for x, y in zip(before, state(), strict=True))
    before, rate, settings = state(), 0.01, model.optimizer.settings
    model.train_step(batches, ScaledLoss(-0.5), unscheduled_lr=rate)
    (beta1, beta2), count, worst, against = (settings.beta1, settings.beta2), 5, 0.0, [0.0, 0.0, 0.0]
    for (weight, first, second), (new, first_new, second_new) in zip(before, state(), strict=True):
        own = (first_new - first) / (1 - beta1)
        expected_second = beta2 * second + (1 - beta2) * own**2
        corrected = (expected_second / (1 - beta2**count)).sqrt() + settings.eps
        expected = weight - rate * (1 - beta1) * own / (1 - beta1**count) / corrected
        worst = max(worst, float((new - expected).abs().max()), float((second_new - expected_second).abs().max()))
        for number, (x, y) in enumerate(((new - weight, first), (new - weight, new - weight), (first, first))):
            against[number] += float((x * y).sum())
    return {"unmoved": unmoved, "worst": worst, "moved": against[1] ** 0.5, "along_momentum": against[0]}


def returns_outside(parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """Returns beyond the bounds of a categorical head, on the second rank alone: 1 and then 3 of the 150 that both ranks hold."""
    found: list[Any] = []
    for beyond in (1, 3):
        size = 100 if dist.get_rank() == 0 else 50
        returns = torch.full((size,), 0.5)
        returns[:beyond] = 1.5 if dist.get_rank() == 1 else 1.0
        experience: Any = SimpleNamespace(batch={"returns": returns}, mask=torch.ones(size, dtype=torch.bool))
        metrics = StepMetrics(metrics_of((), ()))
        try:
            require_returns_within(ValueBins(0.0, 1.0, 10, 0.75), experience, parallel, metrics)
            found.append(metrics.reduce(parallel.data_parallel_group)["critic/returns_outside_frac"])
        except StepBroken as error:
            found.append(str(error))
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, found)
    return {"ranks": ranks}


def main() -> None:
    torch.set_num_threads(1)
    initialize_distributed(5)
    parallel = small_models.context()
    old = [torch.full((sum(shape),), -4.0) for shape in problem.SHAPES]
    _, batches = layouts.microbatches(layouts.Case("qwen2"), parallel, layouts.token_tensors("qwen2", "token", old))
    facts = {
        case.__name__: case(parallel, batches)
        for case in (warm_up, one_rank_is_not_finite, orders_of_epochs, returns_outside, update_outside_the_schedule)
    }
    if dist.get_rank() == 0:
        print(json.dumps(facts), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
