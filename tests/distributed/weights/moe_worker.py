"""Worker: checkpoints of a mixture of experts and expert parallelism. Prints "case LAYOUT ok" for each layout.

moe_worker.py WORKDIR on four ranks, which holds a Qwen3-MoE model in ``model``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.process_groups import release_groups
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import ModelConfig, ParallelConfig
from vapo_mcore.megatron.host import import_megatron, megatron_scope
from vapo_mcore.megatron.model import build_chunks
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_mcore.weights.plan import global_parameters, match_parameters, plan_mapping

WORK = Path(sys.argv[1])
SOURCE = WORK / "model"
LAYOUTS: dict[str, dict[str, int]] = {
    "ep4": {"expert_model_parallel_size": 4},
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "pp2_ep2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}


def rank_parameters(chunk: torch.nn.Module, expected: dict[str, Tensor], parallel: ParallelContext) -> int:
    """Compare every parameter of this rank with what the rules make of the HF tensors; their number."""
    from megatron.core import parallel_state as ps

    arch = read_architecture(SOURCE)
    plan = plan_mapping(arch, "policy")
    experts = (arch.num_experts or 0) // ps.get_expert_model_parallel_world_size()
    offset = ps.get_expert_model_parallel_rank() * experts
    held = match_parameters(plan, global_parameters([chunk], expert_offset=offset))
    for index, parameter in held.items():
        entry = plan[index]
        tp, rank = parallel.tensor_model_parallel_size, parallel.tensor_model_parallel_rank
        if entry.is_expert:
            tp, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
        full = entry.functions.merge([expected[name] for name in entry.hf_names], arch)
        assert torch.equal(parameter, entry.functions.shard(full, tp, rank, arch)), entry
    assert {plan[i].hf_names[0].split(".")[5] for i in held if plan[i].is_expert} == {str(e) for e in range(offset, offset + experts)}
    return len(held)


def main() -> None:
    import_megatron()
    from megatron.core import dist_checkpointing

    expected = load_file(SOURCE / "model.safetensors")
    arch = read_architecture(SOURCE)
    for layout, degrees in LAYOUTS.items():
        parallel = initialize_parallel(ParallelConfig(world_size=4, timeout_minutes=2, **degrees))  # type: ignore[arg-type]
        converted, saved, back = (WORK / f"{kind}_{layout}" for kind in ("converted", "saved", "back"))
        if dist.get_rank() == 0:
            hf_to_megatron(SOURCE, converted)
            saved.mkdir()
        dist.barrier()
        settings = ModelConfig(path=str(SOURCE), dtype="bfloat16")
        (chunk,) = build_chunks("policy", arch, settings, parallel, for_training=False)
        with torch.no_grad(), megatron_scope():
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
            state = chunk.sharded_state_dict()
            chunk.load_state_dict(dist_checkpointing.load(state, str(converted)), strict=False)
        assert rank_parameters(chunk, expected, parallel) == len(list(chunk.parameters()))
        with megatron_scope():
            dist_checkpointing.save(chunk.sharded_state_dict(), str(saved))
        if dist.get_rank() == 0:
            megatron_to_hf(saved, back, config=SOURCE)
            again = load_file(back / "model.safetensors")
            assert again.keys() == expected.keys()
            assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
            print(f"case {layout} ok", flush=True)
        del chunk, state
        release_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
