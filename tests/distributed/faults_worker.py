"""Worker of test_bad_updates.py: faults put into one rank of four, and what they leave behind. Prints one JSON line.

    faults_worker.py FOLDER

FOLDER is a model of the layouts' problem. A fault hits one rank alone: a gradient of a weight that tensor-parallel ranks hold in
common, a loss that is NaN with finite gradients, an infinite loss, a spike.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "layouts"))
import problem
import torch
import torch.distributed as dist
import worker as layouts
from torch import Tensor

from tests.process_groups import release_groups
from vapo_mcore.config.schema import ParallelConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed, initialize_parallel
from vapo_mcore.weights.checksums import tensor_checksum

FOLDER = Path(sys.argv[1])
LAYOUTS = {
    # Without sequence parallelism nothing adds up the gradients of norms over TP: a fault in one rank's copy stays there.
    "tp2-dp2": layouts.Case("qwen2", tp=2, sequence_parallel=False),
    "pp2-dp2": layouts.Case("qwen2", pp=2),
}


class Spoilt(layouts.PolicyTestLoss):
    """The policy's loss, changed on one rank."""

    def __init__(self, rank: int, change: Callable[[Tensor], Tensor]) -> None:
        self.rank, self.change = rank, change

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = super().__call__(outputs, batch)
        return (self.change(loss) if dist.get_rank() == self.rank else loss), stats


@contextmanager
def nan_gradient(model: MegatronModel, rank: int) -> Iterator[None]:
    """The gradient of the last norm weight of ``rank``'s layers is NaN in this block."""
    names = [(name, p) for chunk in model.chunks for name, p in chunk.named_parameters() if name.endswith("input_layernorm.weight")]
    handle = names[-1][1].register_hook(lambda gradient: gradient * math.nan) if dist.get_rank() == rank else None
    yield
    if handle is not None:
        handle.remove()


def state(model: MegatronModel) -> list[str]:
    """Checksums of all weights, of AdamW's state and main weights, and the schedule, of this rank."""
    assert model.optimizer is not None
    found = [tensor_checksum(parameter) for chunk in model.chunks for parameter in chunk.parameters()]
    for one in model.optimizer.megatron.chained_optimizers:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                found.append(tensor_checksum(parameter))
                found += [f"{name} {tensor_checksum(torch.as_tensor(value))}" for name, value in one.optimizer.state[parameter].items()]
            found.append(f"{group['lr']} {group['weight_decay']}")
    return [*found, json.dumps(model.optimizer.scheduler.state_dict(), sort_keys=True)]


def survey(parallel: ParallelContext, batches: list[MicroBatch], name: str) -> dict[str, Any]:
    """Each fault between two good updates, on one model that lives through all; another model makes the good updates alone."""
    model, undisturbed = (layouts.build("policy", layouts.Case("qwen2"), FOLDER, parallel) for _ in range(2))
    good = layouts.PolicyTestLoss()
    # A rank other than the first of its tensor-parallel group, and of the last stage where it is about the loss.
    rank = 1 if name.startswith("tp") else 2
    model.train_step(batches, good)
    undisturbed.train_step(batches, good)
    facts: dict[str, Any] = {}

    def attempt(fault: str, **arguments: Any) -> None:
        before = state(model)
        with nan_gradient(model, rank) if fault == "gradient" else nan_gradient(model, -1):
            result = model.train_step(batches, **arguments)
        after = state(model)
        facts[fault] = {
            "skipped": None if result.skipped is None else result.skipped.name,
            "untouched": before == after,
            "norm_is_finite": math.isfinite(result.grad_norm),
        }
        model.train_step(batches, good)
        undisturbed.train_step(batches, good)
        facts[fault]["next_as_if_it_had_not_been"] = state(model) == state(undisturbed) and state(model) != before

    attempt("gradient", loss=good)
    attempt("nan_loss", loss=Spoilt(rank, lambda loss: loss + loss.new_tensor(math.nan)))
    attempt("infinite_loss", loss=Spoilt(rank, lambda loss: loss * math.inf))
    attempt("spike", loss=good, is_spike=lambda _: dist.get_rank() == 3)
    return facts


def settings(case: layouts.Case) -> ParallelConfig:
    degrees = {"tensor_model_parallel_size": case.tp, "pipeline_model_parallel_size": case.pp}
    return ParallelConfig(world_size=4, sequence_parallel=False, timeout_minutes=5, **degrees)  # type: ignore[arg-type]


def main() -> None:
    torch.set_num_threads(1)
    initialize_distributed(5)
    old = [torch.full((sum(shape),), -4.0) for shape in problem.SHAPES]
    tensors = layouts.token_tensors("qwen2", "token", old)
    for name, case in LAYOUTS.items():
        parallel = initialize_parallel(settings(case))
        _, batches = layouts.microbatches(case, parallel, tensors)
        ranks: list[dict[str, Any]] = [{}] * 4
        dist.all_gather_object(ranks, survey(parallel, batches, name))
        if dist.get_rank() == 0:
            print(json.dumps({"layout": name, "ranks": ranks}), flush=True)
        release_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
