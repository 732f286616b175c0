"""The plans of 30B to 70B models against Megatron's own parameters at TP8 x PP4, on the meta device in one process.

python meta_worker.py: a fake process group stands for the 32 ranks, one pipeline stage after the other; prints "model NAME: N parameters".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vapo_mcore.config.schema import ModelConfig, ParallelConfig
from vapo_mcore.megatron.model import build_chunks
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.weights.plan import global_parameters, match_parameters, plan_mapping, require_complete

TP, PP = 8, 4
META = torch.device("meta")
PARAMETERS = {"qwen2.5-32b": 32_763_876_352, "qwen3-32b": 32_762_123_264, "llama-3.3-70b": 70_553_706_496, "qwen3-30b-a3b": 30_532_122_624}
"""Numbers that the models' cards and safetensors indices state."""


def check(name: str) -> None:
    arch = find_architecture(name)
    plan = plan_mapping(arch, "policy")
    held: list[int] = []
    for stage in range(PP):
        dist.init_process_group("fake", store=FakeStore(), rank=stage * TP, world_size=TP * PP)
        degrees = {"tensor_model_parallel_size": TP, "pipeline_model_parallel_size": PP}
        parallel = initialize_parallel(ParallelConfig(world_size=TP * PP, **degrees))  # type: ignore[arg-type]
        assert parallel.pipeline_model_parallel_rank == stage
        chunks = build_chunks("policy", arch, ModelConfig(path="unused"), parallel, device=META, for_training=False)
        for index, parameter in match_parameters(plan, global_parameters(chunks)).items():
            assert tuple(parameter.shape) == plan[index].shard_shape(TP, arch), plan[index]
            held.append(index)
        dist.destroy_process_group()
    assert sorted(held) == list(range(len(plan)))
    require_complete(plan, held)
    count = sum(torch.Size(shape).numel() for entry in plan for shape in entry.hf_shapes)
    assert count == PARAMETERS[name], count
    print(f"model {name}: {count} parameters", flush=True)


if __name__ == "__main__":
    for model in PARAMETERS:
        check(model)
