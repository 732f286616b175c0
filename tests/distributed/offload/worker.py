"""Worker of test_offload.py: policy and critic take turns for ten steps; prints one JSON line of facts a case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
import torch
import torch.distributed as dist
import worker as layouts
from torch import Tensor

from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.offload import RESIDENCY, Residency
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed, initialize_parallel
from vapo_mcore.rollout.base import Replica
from vapo_mcore.rollout.transformers_engine import TransformersEngine
from vapo_mcore.weights.loader import load_hf_into
from vapo_mcore.weights.sync import WeightSync

CYCLES = 10


def build(role: str, folder: Path, dtype: str, parallel: ParallelContext) -> MegatronModel:
    architecture = read_architecture(folder)

    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, folder, architecture, parallel, role=role, head_init="small" if role == "critic" else None)  # type: ignore[arg-type]

    model: Any = SimpleNamespace(dtype=dtype, attention="auto", recompute="none")
    return MegatronModel(role, architecture, model, parallel, load_weights=load, optimizer=layouts.OPTIMIZER)  # type: ignore[arg-type]


def state(models: dict[str, MegatronModel]) -> dict[str, Tensor]:
    """Every parameter and every optimizer tensor, copied."""
    result = {}
    for role, model in models.items():
        for number, chunk in enumerate(model.chunks):
            result |= {f"{role}.{number}.{name}": parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        assert model.optimizer is not None
        for number, optimizer in enumerate(model.optimizer.megatron.chained_optimizers):
            for index, values in enumerate(optimizer.optimizer.state.values()):
                result |= {
                    f"{role}.opt.{number}.{index}.{key}": value.clone() for key, value in values.items() if isinstance(value, Tensor)
                }
            for index, parameter in enumerate(p for group in optimizer.optimizer.param_groups for p in group["params"]):
                result[f"{role}.main.{number}.{index}"] = parameter.detach().clone()
    return result


def run(folder: Path, dtype: str, parallel: ParallelContext, *, offload: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    case = layouts.Case("qwen2")
    reference = layouts.Reference(folder.parent, "qwen2")
    _, batches = layouts.microbatches(case, parallel, layouts.token_tensors(case.model, "token", reference.by_row("old")))
    models = {role: build(role, folder, dtype, parallel) for role in ("policy", "critic")}
    residency = Residency(enabled=offload)
    for model in models.values():
        residency.add(model)
    facts: dict[str, Any] = {"resident": {}, "device": [], "host": [], "moved": [], "synced": []}
    replica = Replica.of_rank(dist.get_rank(), dist.get_world_size(), 1)
    engine = TransformersEngine(folder, getattr(torch, dtype), replica, max_model_len=64, device=torch.device("cpu"))
    sync = WeightSync(models["policy"], engine, residency, verify=True)
    residency.enter("sync")
    frozen = residency.offloaders["policy"].copy_params("reference") if offload else []
    for cycle in range(CYCLES):
        before = (residency.traffic.to_device, residency.traffic.to_host)
        for stage in ("generate", "values", "critic_update", "logprobs", "policy_update", "sync"):
            residency.enter(stage)  # type: ignore[arg-type]
            facts["resident"][stage] = {
                name: {part: num_bytes for part, num_bytes in offloader.device_bytes().items() if num_bytes}
                for name, offloader in residency.offloaders.items()
            }
            if stage == "values":
                models["critic"].forward(batches)
            elif stage == "logprobs":
                own = torch.cat(models["policy"].forward(batches)["logprobs"])
                if offload:
                    with residency.offloaders["policy"].other_params(frozen):
                        other = torch.cat(models["policy"].forward(batches)["logprobs"])
                    again = torch.cat(models["policy"].forward(batches)["logprobs"])
                    facts["reference"] = [bool(torch.equal(own, again)), bool(torch.equal(own, other)) == (cycle == 0)]
                    facts.setdefault("reference_logprobs", other)
                    facts["reference"].append(bool(torch.equal(facts["reference_logprobs"], other)))
            elif stage.endswith("update"):
                role = stage.split("_")[0]
                loss: Any = layouts.PolicyTestLoss() if role == "policy" else layouts.ValueTestLoss()
                models[role].train_step(batches, loss)
                residency.mark_changed(role)
            elif stage == "sync":  # verified: the engine's parameters are those of the policy
                facts["synced"].append(sync.make_ready(after_loading=lambda: residency.enter("generate")).checksums)
                sync.put_to_sleep()
        residency.enter("generate")
        facts["device"].append(residency.device_bytes())
        facts["host"].append(residency.host_bytes())
        facts["moved"].append((residency.traffic.to_device - before[0], residency.traffic.to_host - before[1]))
        if cycle == 4:
            with residency.all_resident():  # what a checkpoint does
                state(models)
    with residency.all_resident():
        final = state(models)
        facts["bytes"] = {name: offloader.device_bytes() for name, offloader in residency.offloaders.items()}
    facts.pop("reference_logprobs", None)
    return final, facts


def main() -> None:
    torch.set_num_threads(1)
    initialize_distributed(5)
    folder = Path(sys.argv[1]) / "qwen2"
    layout: dict[str, Any] = {"world_size": dist.get_world_size(), "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    layout |= {"virtual_pipeline_model_parallel_size": None, "context_parallel_size": 1, "expert_model_parallel_size": 1}
    layout |= {"expert_tensor_parallel_size": None}
    parallel = initialize_parallel(SimpleNamespace(**layout, sequence_parallel=None, equal_microbatches=False, timeout_minutes=5))  # type: ignore[arg-type]
    for dtype in ("float32", "bfloat16"):
        plain, plain_facts = run(folder, dtype, parallel, offload=False)
        moved, facts = run(folder, dtype, parallel, offload=True)
        assert set(plain) == set(moved)
        facts["synced"] = [len(facts["synced"]), len({str(sums) for sums in facts["synced"]}), facts["synced"] == plain_facts["synced"]]
        facts["different"] = [name for name in plain if not torch.equal(plain[name], moved[name])]
        if dist.get_rank() == 0:
            print(
                json.dumps(
                    {"dtype": dtype, "rows": {stage: {m: sorted(p) for m, p in row.items()} for stage, row in RESIDENCY.items()}, **facts}
                )
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
