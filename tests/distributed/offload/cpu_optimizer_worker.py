"""Worker of test_cpu_optimizer.py, two processes: the optimizer on the CPU against the one on the device and AdamW in float64.

    cpu_optimizer_worker.py FOLDER

FOLDER holds the layouts' model "qwen2". Prints one JSON line of facts a case, the worst of both ranks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
import torch
import torch.distributed as dist
import worker as layouts
from torch import Tensor

from tests.process_groups import release_groups
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import OptimizerConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.host import import_megatron
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.megatron.optimizer import Skipped, hybrid_optimizers
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed, initialize_parallel
from vapo_mcore.planning.measure import buffer_state
from vapo_mcore.weights.loader import load_hf_into

FOLDER = Path(sys.argv[1])
import_megatron()
CHECKPOINTS = find_spec("megatron.core.dist_checkpointing.strategies.base") is not None
"""What vapo_mcore.checkpoint builds on; Megatron-Core 0.19.2 does not have it any more."""
UPDATES, WARMUP, UNSCHEDULED_LR = 6, 4, 5e-4
ON_DEVICE = OptimizerConfig(**{**dict(layouts.OPTIMIZER), "clip_grad": 0.05})
ON_CPU = ON_DEVICE.model_copy(update={"cpu_offload": True})


def build(
    role: str, dtype: str, parallel: ParallelContext, settings: OptimizerConfig, *, head_only: bool = False, bias_only: bool = False
) -> MegatronModel:
    architecture = read_architecture(FOLDER / "qwen2")

    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, FOLDER / "qwen2", architecture, parallel, role=role, head_init="small" if role == "critic" else None)  # type: ignore[arg-type]
        if bias_only:
            chunks[-1].output_layer.weight.requires_grad_(False)

    model: Any = SimpleNamespace(dtype=dtype, attention="auto", recompute="none")
    return MegatronModel(
        role,  # type: ignore[arg-type]
        architecture,
        model,
        parallel,
        load_weights=load,
        optimizer=settings,
        warmup_updates=WARMUP,
        head_only=head_only,
    )


def shards(model: MegatronModel) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, whole parameter, this rank's shard of it, the shard's gradient before clipping) of what this rank's optimizer updates.

    A shard is found by where it begins in the parameter buffer: by nothing that Megatron keeps of the order.
    """
    assert model.optimizer is not None
    for number, one in enumerate(model.optimizer.megatron.chained_optimizers):
        found = {shard.data_ptr(): shard for group in one.param_groups for shard in group["params"]}
        names = {parameter: name for chunk in model.chunks for name, parameter in chunk.named_parameters()}
        for parameter in one.model_param_gbuf_map if found else ():
            if parameter not in one.model_param_group_index_map:
                continue
            at = one._get_model_param_range_map(parameter)["param"]
            shard = found[parameter.data_ptr() + at.start * parameter.element_size()]
            yield f"{number}.{names[parameter]}", parameter, shard, parameter.main_grad.view(-1)[at.start : at.end]


class Oracle:
    """torch's AdamW in float64, fed with the same gradients: clipping, rate and weight decay are worked out here."""

    def __init__(self, model: MegatronModel) -> None:
        self.weights = {name: shard.detach().double().clone() for name, _, shard, _ in shards(model)}
        decayed = {name: parameter.ndim > 1 for name, parameter, _, _ in shards(model)}
        groups = [
            {"params": [weight for name, weight in self.weights.items() if decayed[name] == matrix], "weight_decay": decay}
            for matrix, decay in ((True, ON_CPU.weight_decay), (False, 0.0))
        ]
        betas = (ON_CPU.beta1, ON_CPU.beta2)
        self.adam = torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, eps=ON_CPU.eps, foreach=False)

    def step(self, gradients: dict[str, Tensor], norm: float, rate: float, *, outside: bool) -> None:
        """One update; one ``outside`` the schedule follows its own gradient, without momentum and weight decay."""
        share = min(1.0, ON_CPU.clip_grad / (norm + 1e-6))
        for name, gradient in gradients.items():
            self.weights[name].grad = gradient * share
        decays = [group["weight_decay"] for group in self.adam.param_groups]
        moments = [(values["exp_avg"], values["exp_avg"].clone()) for values in self.adam.state.values()] if outside else []
        for group in self.adam.param_groups:
            group.update({"lr": rate, **({"weight_decay": 0.0} if outside else {})})
        for moment, _ in moments:
            moment.zero_()
        self.adam.step()
        for moment, before in moments:
            moment.add_(before)
        for group, decay in zip(self.adam.param_groups, decays, strict=True):
            group["weight_decay"] = decay


def main_parameters(model: MegatronModel) -> dict[str, Tensor]:
    assert model.optimizer is not None
    mains = {shard: main for hybrid in hybrid_optimizers(model.optimizer.megatron) for shard, main in hybrid.param_to_inner_param.items()}
    return {name: mains[shard] for name, _, shard, _ in shards(model)}


def weights(model: MegatronModel) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in model.chunks for parameter in chunk.parameters()]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def share_apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The share of weights that differ."""
    return sum(int((a != b).sum()) for a, b in zip(one, other, strict=True)) / sum(a.numel() for a in one)


def worst(facts: dict[str, Any]) -> dict[str, Any]:
    """Of both ranks: the larger number, the smaller truth."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, facts)
    return {key: all(r[key] for r in ranks) if isinstance(facts[key], bool) else max(r[key] for r in ranks) for key in facts}


def loss_of(role: str) -> Any:
    return layouts.PolicyTestLoss() if role == "policy" else layouts.ValueTestLoss()


def updates(role: str, dtype: str, parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """Warm-up, clipping, weight decay, one update outside the schedule, and one that an infinite gradient of the last rank skips.

    The model on the device is given the gradients of the other before every update, so that AdamW alone is compared; a free run of its
    own shows what training makes of the rounding.
    """
    on_cpu, same, free = (build(role, dtype, parallel, settings) for settings in (ON_CPU, ON_DEVICE, ON_DEVICE))
    assert on_cpu.optimizer is not None and same.optimizer is not None and free.optimizer is not None
    oracle, count, facts = Oracle(on_cpu), 0, {"clipped": True, "norm": 0.0, "skipped_alike": True, "unchanged": True}
    for number in range(UPDATES):
        unscheduled = UNSCHEDULED_LR if number == 2 else None
        on_cpu.accumulate(batches, loss_of(role))
        same.accumulate(batches, loss_of(role))
        if number == 4 and dist.get_rank() == dist.get_world_size() - 1:
            # of a norm where this rank has one: with tensor parallelism the gradient norm does not count those of this rank
            min(shards(on_cpu), key=lambda shard: "layernorm" not in shard[0])[3][:1] = math.inf
        with torch.no_grad():
            for mine, theirs in zip(on_cpu.wrapped, same.wrapped, strict=True):
                for source, target in zip(mine.buffers, theirs.buffers, strict=True):
                    target.grad_data.copy_(source.grad_data)
        gradients = {name: gradient.double().clone() for name, _, _, gradient in shards(on_cpu)}
        before = weights(on_cpu) + [main.clone() for main in main_parameters(on_cpu).values()]
        norm, reason = on_cpu.optimizer.step(unscheduled_lr=unscheduled)
        expected_norm, expected_reason = same.optimizer.step(unscheduled_lr=unscheduled)
        free.accumulate(batches, loss_of(role))
        free.optimizer.step(Skipped.SPIKE if number == 4 else None, unscheduled_lr=unscheduled)
        facts["skipped_alike"] &= (reason is not None) == (expected_reason is not None) == (number == 4)
        if reason is not None:
            facts["norm_tells"] = not math.isfinite(norm)
            after = weights(on_cpu) + [main.clone() for main in main_parameters(on_cpu).values()]
            facts["unchanged"] &= all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            continue
        facts["clipped"] &= norm > ON_CPU.clip_grad
        facts["norm"] = max(facts["norm"], abs(norm - expected_norm) / norm)
        count += unscheduled is None
        oracle.step(
            gradients, norm, ON_CPU.lr * min(1.0, count / WARMUP) if unscheduled is None else unscheduled, outside=unscheduled is not None
        )
    mains = main_parameters(on_cpu)
    facts["oracle"] = max((float((mains[name] - weight).abs().max()) for name, weight in oracle.weights.items()), default=0.0)
    facts["moved"] = max(
        (float((mains[name] - start.double()).abs().max()) for name, start in Oracle(build(role, dtype, parallel, ON_CPU)).weights.items()),
        default=0.0,
    )
    facts["weights_are_main"] = all(torch.equal(shard.detach(), mains[name].to(shard.dtype)) for name, _, shard, _ in shards(on_cpu))
    facts["device_optimizer"] = distance(weights(on_cpu), weights(same))
    facts["free_run"] = distance(weights(on_cpu), weights(free))
    facts["free_run_differs"] = share_apart(weights(on_cpu), weights(free))
    facts["largest_weight"] = max(float(weight.abs().max()) for weight in weights(on_cpu))
    facts["updates"] = on_cpu.optimizer.updates
    steps = {int(values["step"]) for hybrid in hybrid_optimizers(on_cpu.optimizer.megatron) for values in hybrid.state.values()}
    facts["counted"] = steps == {on_cpu.optimizer.all_updates}
    return worst(facts)


def memory(parallel: ParallelContext, batches: list[MicroBatch], dtype: str) -> dict[str, Any]:
    """Ten rounds of both models taking turns: what is on the device in an update, and host bytes."""
    residency = Residency(enabled=True)
    models = {role: build(role, dtype, parallel, ON_CPU) for role in ("policy", "critic")}
    rank = parallel.data_parallel_rank
    states = {role: buffer_state(model.wrapped, parallel, cpu_offload=True)[rank] for role, model in models.items()}
    for model in models.values():
        residency.add(model)
    host, in_update, moved = [], [], []
    for _ in range(10):
        before = residency.traffic.to_device
        for role, model in models.items():
            residency.enter(f"{role}_update")  # type: ignore[arg-type]
            assert model.train_step(batches, loss_of(role)).skipped is None
            residency.mark_changed(role)
            in_update.append(residency.offloaders[role].device_bytes())
        residency.enter("generate")
        host.append(residency.host_bytes())
        moved.append(residency.traffic.to_device - before)
    planned = sum(state.params + state.host for state in states.values())
    facts = {
        "planned": all(
            bytes_ == {"params": states[role].params, "grads": states[role].grads, "optimizer": 0}
            for number, bytes_ in enumerate(in_update)
            for role in [("policy", "critic")[number % 2]]
        ),
        "flat": len(set(host)) == 1 and residency.device_bytes() == 0,
        "host_is_planned": host[-1] == planned,
        "only_params_move": set(moved) == {sum(state.params for state in states.values())},
    }
    residency.remove("critic")
    facts["given_back"] = residency.host_bytes() == states["policy"].params + states["policy"].host
    return worst(facts)


def checkpoints(role: str, dtype: str, parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """Saved and loaded on the CPU, or on the device before or after, in both forms: one more update gives the same."""
    from vapo_mcore.checkpoint.models import ModelSaver, check_steps, load_optimizer, load_weights

    facts: dict[str, Any] = {}
    for source in (ON_CPU, ON_DEVICE):
        model, saver = build(role, dtype, parallel, source), ModelSaver()
        for _ in range(2):
            model.train_step(batches, loss_of(role))
        for form in ("dp_reshardable", "fully_reshardable"):
            name = f"{role}_{dtype}_{parallel.data_parallel_size}_{source.cpu_offload}_{form}"
            for part in ("weights", "optimizer") if dist.get_rank() == 0 else ():
                (FOLDER / name / part).mkdir(parents=True)
            dist.barrier()
            parts = [saver.weights(model, FOLDER / name / "weights"), saver.optimizer(model, FOLDER / name / "optimizer", form)]  # type: ignore[arg-type]
            for part in parts:
                part.write()
                part.finish()
            dist.barrier()
        model.train_step(batches, loss_of(role))
        for form in ("dp_reshardable", "fully_reshardable"):
            name = f"{role}_{dtype}_{parallel.data_parallel_size}_{source.cpu_offload}_{form}"
            for target in (ON_CPU, ON_DEVICE) if source.cpu_offload else (ON_CPU,):
                other = build(role, dtype, parallel, target)
                load_weights(other, FOLDER / name / "weights")
                load_optimizer(other, FOLDER / name / "optimizer", form, 2)  # type: ignore[arg-type]
                other.train_step(batches, loss_of(role))
                check_steps(other)
                side = {True: "cpu", False: "device"}
                key = f"{side[source.cpu_offload]} to {side[target.cpu_offload]}, {form}"
                facts[key] = distance(weights(model), weights(other))
    return worst(facts)


def bias_alone(parallel: ParallelContext, batches: list[MicroBatch]) -> dict[str, Any]:
    """Of a value head that is trained alone only the bias is: the second data-parallel rank has nothing to update."""
    model, other = (build("critic", "bfloat16", parallel, settings, head_only=True, bias_only=True) for settings in (ON_CPU, ON_DEVICE))
    for one in (model, other):
        for _ in range(2):
            assert one.train_step(batches, layouts.ValueTestLoss()).skipped is None
    empty = dist.get_rank() == 0 or next(shards(model), None) is None
    return worst({"second_rank_is_empty": empty, "distance": distance(weights(model), weights(other))})


def main() -> None:
    torch.set_num_threads(1)
    initialize_distributed(5)
    old = [torch.full((sum(shape),), -4.25) for shape in layouts.problem.SHAPES]
    for layout, tp in (("dp2", 1), ("tp2", 2)):
        degrees: dict[str, Any] = {"world_size": 2, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1}
        degrees |= {"virtual_pipeline_model_parallel_size": None, "context_parallel_size": 1, "expert_model_parallel_size": 1}
        degrees |= {"expert_tensor_parallel_size": None}
        parallel = initialize_parallel(SimpleNamespace(**degrees, sequence_parallel=None, equal_microbatches=False, timeout_minutes=5))  # type: ignore[arg-type]
        _, batches = layouts.microbatches(layouts.Case("qwen2"), parallel, layouts.token_tensors("qwen2", "token", old))
        facts: dict[str, Any] = {}
        for role, dtype in (("policy", "float32"), ("policy", "bfloat16"), ("critic", "bfloat16")):
            facts[f"updates {role} {dtype}"] = updates(role, dtype, parallel, batches)
        facts["memory bfloat16"] = memory(parallel, batches, "bfloat16")
        if CHECKPOINTS:
            facts["checkpoints critic bfloat16"] = checkpoints("critic", "bfloat16", parallel, batches)
        if tp == 1:
            facts["memory float32"] = memory(parallel, batches, "float32")
            if CHECKPOINTS:
                facts["checkpoints policy float32"] = checkpoints("policy", "float32", parallel, batches)
            facts["bias alone"] = bias_alone(parallel, batches)
        if dist.get_rank() == 0:
            for case, found in facts.items():
                print(json.dumps({"case": f"{layout} {case}", **found}), flush=True)
        release_groups()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
