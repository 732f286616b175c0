"""torchrun worker of test_checkpoint_models.py: models and optimizers through save and load at several layouts; one JSON line a case.

Two processes. What was saved at one layout is loaded at another and saved again: the global tensors of both folders must be the same
bits. Megatron's own loader reads the folders too.
"""

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

from vapo_mcore.checkpoint.models import (
    FolderSave,
    ModelSaver,
    check_steps,
    load_optimizer,
    load_weights,
)
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.host import megatron_scope
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed, initialize_parallel
from vapo_mcore.planning.state import snapshot_bytes
from vapo_mcore.weights.distcp import DistributedCheckpointReader
from vapo_mcore.weights.loader import load_hf_into

FOLDER = Path(sys.argv[1])
UPDATES = 3


def context(**degrees: int) -> ParallelContext:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
    layout: dict[str, Any] = dict.fromkeys(names, 1)
    layout |= dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")) | degrees
    layout |= {
        "world_size": dist.get_world_size(),
        "sequence_parallel": None,
        "equal_microbatches": False,
        "timeout_minutes": 5,
    }
    return initialize_parallel(SimpleNamespace(**layout))  # type: ignore[arg-type]


def build(role: str, dtype: str, parallel: ParallelContext, *, head_only: bool = False, model: str = "qwen2") -> MegatronModel:
    folder = FOLDER / model
    architecture = read_architecture(folder)

    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, folder, architecture, parallel, role=role, head_init="small" if role == "critic" else None)  # type: ignore[arg-type]

    settings: Any = SimpleNamespace(dtype=dtype, attention="auto", recompute="none")
    return MegatronModel(
        role,  # type: ignore[arg-type]
        architecture,
        settings,
        parallel,
        load_weights=load,
        optimizer=layouts.OPTIMIZER,
        head_only=head_only,
    )


def train(model: MegatronModel, parallel: ParallelContext, updates: int) -> list[float]:
    case = layouts.Case("qwen2")
    old = [torch.full((sum(shape),), -4.25, dtype=torch.float64) for shape in layouts.problem.SHAPES]  # about log(1 / vocabulary)
    _, batches = layouts.microbatches(case, parallel, layouts.token_tensors(case.model, "token", old))
    loss: Any = layouts.PolicyTestLoss() if model.role == "policy" else layouts.ValueTestLoss()
    return [model.train_step(batches, loss).grad_norm for _ in range(updates)]


def written(save: FolderSave) -> None:
    save.write()
    save.finish()
    dist.barrier()


def save(model: MegatronModel, name: str, form: str, saver: ModelSaver) -> None:
    for part in ("weights", "optimizer"):
        if dist.get_rank() == 0:
            (FOLDER / name / part).mkdir(parents=True)
    dist.barrier()
    saves = [saver.weights(model, FOLDER / name / "weights"), saver.optimizer(model, FOLDER / name / "optimizer", form)]  # type: ignore[arg-type]
    with torch.no_grad():  # training goes on before the writing begins: the snapshot must not notice
        kept = [parameter.clone() for chunk in model.chunks for parameter in chunk.parameters()]
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.add_(1.0)
    for part in saves:
        written(part)
    with torch.no_grad():
        for parameter, value in zip((p for chunk in model.chunks for p in chunk.parameters()), kept, strict=True):
            parameter.copy_(value)


def loaded(role: str, dtype: str, parallel: ParallelContext, name: str, form: str, **options: Any) -> MegatronModel:
    model = build(role, dtype, parallel, **options)
    load_weights(model, FOLDER / name / "weights")
    load_optimizer(model, FOLDER / name / "optimizer", form, UPDATES)  # type: ignore[arg-type]
    check_steps(model)
    return model


def different(one: str, other: str, part: str) -> list[str]:
    """Global tensors that are not the same in both folders; the vocabulary's padding aside."""
    first, second = (DistributedCheckpointReader(FOLDER / name / part) for name in (one, other))
    keys = set(first.keys) | set(second.keys)
    found = [key for key in keys if key not in first or key not in second]
    for key in keys - set(found):
        shape = tuple(min(a, b) for a, b in zip(first.shape(key), second.shape(key), strict=True))
        whole = [reader.read(key, (0,) * len(shape), shape) for reader in (first, second)]
        if whole[0].dtype != whole[1].dtype or not torch.equal(*whole):
            found.append(key)
    return sorted(found)


def resharding(role: str, dtype: str) -> dict[str, Any]:
    """tp2 -> pp2 -> dp2 -> tp2: what arrives is what left, and the training that follows is the same."""
    name = f"{role}_{dtype}"
    tp2 = context(tensor_model_parallel_size=2)
    model = build(role, dtype, tp2)
    train(model, tp2, UPDATES)
    save(model, f"{name}_tp2", "fully_reshardable", ModelSaver())
    save(model, f"{name}_same", "dp_reshardable", ModelSaver())
    again = loaded(role, dtype, tp2, f"{name}_same", "dp_reshardable")
    norms = {"tp2": train(model, tp2, 2)}
    exact = train(again, tp2, 2) == norms["tp2"] and all(
        torch.equal(a, b)
        for one, other in zip(model.chunks, again.chunks, strict=True)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
    previous, faults = f"{name}_tp2", {}
    copies = {}
    for layout, degrees in (("pp2", {"pipeline_model_parallel_size": 2}), ("dp2", {}), ("cp2", {"context_parallel_size": 2})):
        parallel = context(**degrees)
        other = loaded(role, dtype, parallel, previous, "fully_reshardable")
        saver = ModelSaver()
        save(other, f"{name}_{layout}", "fully_reshardable", saver)
        save(other, f"{name}_{layout}_shards", "dp_reshardable", saver)
        copies[layout] = copied(saver, role, dtype, parallel)
        if dist.get_rank() == 0:
            faults[layout] = different(previous, f"{name}_{layout}", "weights") + different(previous, f"{name}_{layout}", "optimizer")
        norms[layout] = train(other, parallel, 2)
        previous = f"{name}_{layout}"
    return {"exact": exact, "different": faults, "norms": norms, "copies": copies}


def mixture(role: str, dtype: str) -> dict[str, Any]:
    """Experts over two ranks -> the same -> TP 2 with half of the experts each -> PP 2 -> all experts on both ranks."""
    name, options = f"mixture_{role}_{dtype}", {"model": layouts.problem.MIXTURE}
    ep2 = context(expert_model_parallel_size=2)
    model = build(role, dtype, ep2, model=layouts.problem.MIXTURE)
    train(model, ep2, UPDATES)
    save(model, f"{name}_ep2", "fully_reshardable", ModelSaver())
    save(model, f"{name}_same", "dp_reshardable", ModelSaver())
    again = loaded(role, dtype, ep2, f"{name}_same", "dp_reshardable", **options)
    norms = {"ep2": train(model, ep2, 2)}
    exact = train(again, ep2, 2) == norms["ep2"]
    faults, previous = {}, f"{name}_ep2"
    half = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for layout, degrees in (("tp2", half), ("pp2", {"pipeline_model_parallel_size": 2}), ("dp2", {})):
        parallel = context(**degrees)
        other = loaded(role, dtype, parallel, previous, "fully_reshardable", **options)
        save(other, f"{name}_{layout}", "fully_reshardable", ModelSaver())
        if dist.get_rank() == 0:
            faults[layout] = different(previous, f"{name}_{layout}", "weights") + different(previous, f"{name}_{layout}", "optimizer")
        norms[layout] = train(other, parallel, 2)
        previous = f"{name}_{layout}"
    return {"exact": exact, "different": faults, "norms": norms}


def copied(saver: ModelSaver, role: Any, dtype: str, parallel: Any) -> list[tuple[int, int]]:
    """Bytes of the copies of each rank, and what the plan says of them."""
    architecture, stage = read_architecture(FOLDER / "qwen2"), parallel.pipeline_model_parallel_rank
    planned = snapshot_bytes(architecture, role, dtype, parallel, stage=stage, overlap=False)
    return all_gather_objects((saver.pool.num_bytes, planned[dist.get_rank(parallel.data_context_parallel_group)]))


def read_by_megatron() -> dict[str, Any]:
    """dist_checkpointing's own strategies read what ours have written."""
    from megatron.core import dist_checkpointing

    from vapo_mcore.checkpoint.models import weights_state

    parallel = context(tensor_model_parallel_size=2)
    model = build("policy", "float32", parallel)
    with megatron_scope():
        theirs = dist_checkpointing.load(weights_state(model.chunks), str(FOLDER / "policy_float32_tp2" / "weights"))
    load_weights(model, FOLDER / "policy_float32_tp2" / "weights")
    ours = {name: value for name, value in model.chunks[0].state_dict().items() if isinstance(value, torch.Tensor)}
    return {"different": [name for name, value in ours.items() if not torch.equal(theirs["chunk0"][name], value)], "compared": len(ours)}


def head_only_pipeline() -> dict[str, Any]:
    """A stage without a trainable parameter has no optimizer state, and none is missed."""
    parallel = context(pipeline_model_parallel_size=2)
    model = build("critic", "float32", parallel, head_only=True)
    train(model, parallel, UPDATES)
    result = {}
    for form in ("dp_reshardable", "fully_reshardable"):
        save(model, f"head_{form}", form, ModelSaver())
        again = loaded("critic", "float32", parallel, f"head_{form}", form, head_only=True)
        save(again, f"head_{form}_again", form, ModelSaver())
        if dist.get_rank() == 0:
            result[form] = different(f"head_{form}", f"head_{form}_again", "optimizer") + different(
                f"head_{form}", f"head_{form}_again", "weights"
            )
    return {"different": result}


def refused() -> dict[str, Any]:
    """Another layout than the form allows, and a critic's weights for a policy."""
    parallel = context()
    messages = {}
    attempts = {
        "layout": lambda: loaded("policy", "float32", parallel, "policy_float32_same", "dp_reshardable"),
        "role": lambda: load_weights(build("policy", "float32", parallel), FOLDER / "critic_float32_dp2" / "weights"),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except CheckpointError as error:
            messages[name] = str(error)
    return {"messages": messages}


CASES: dict[str, Any] = {
    "policy_float32": lambda: resharding("policy", "float32"),
    "critic_float32": lambda: resharding("critic", "float32"),
    "policy_bfloat16": lambda: resharding("policy", "bfloat16"),
    "critic_bfloat16": lambda: resharding("critic", "bfloat16"),
    "mixture_policy": lambda: mixture("policy", "float32"),
    "mixture_critic": lambda: mixture("critic", "bfloat16"),
    "read_by_megatron": read_by_megatron,
    "head_only_pipeline": head_only_pipeline,
    "refused": refused,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    initialize_distributed(5)
    for name, case in CASES.items():
        facts = case()
        if dist.get_rank() == 0:
            print(json.dumps({"case": name, **facts}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
