"""Worker of one process: state of models of Transformer Engine's layers. Writes one JSON object to FILE.

    states_worker.py fake FILE [PART OF A NAME]

``offload``: steps of policy and critic in turns with offload (``tests/fake_cuda/step_worker.py``), beside those of Megatron's own layers.
``checkpoint``: what one kind of layers writes and the other reads, weights and both formats of optimizer state.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests import te_reference

te_reference.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformer_engine.pytorch.cpp_extensions.gemm import get_cublas_workspace_size_bytes  # noqa: E402

from tests import fake_cuda  # noqa: E402
from tests.fake_cuda import step_worker  # noqa: E402
from tests.fake_cuda.models import LENGTHS, MIXTURE, SHAPE, TokenLoss, build, microbatches  # noqa: E402
from tests.process_groups import release_groups  # noqa: E402
from vapo_mcore.checkpoint.models import ModelSaver, load_optimizer, load_weights, weights_state  # noqa: E402
from vapo_mcore.config.architecture import ModelArchitecture  # noqa: E402
from vapo_mcore.config.schema import ParallelConfig  # noqa: E402
from vapo_mcore.megatron.engine import MegatronModel  # noqa: E402
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel  # noqa: E402
from vapo_mcore.weights.export import Exporter  # noqa: E402

UPDATES = 2


def update(model: MegatronModel, parallel: ParallelContext, count: int) -> list[float]:
    return [model.train_step(microbatches(parallel, LENGTHS), TokenLoss()).grad_norm for _ in range(count)]


def exported(model: MegatronModel, parallel: ParallelContext) -> dict[str, torch.Tensor]:
    exporter = Exporter(model.chunks, model.architecture, parallel, role=model.role)  # type: ignore[arg-type]
    return {name: tensor.to("cpu", copy=True) for bucket in exporter.buckets() for name, tensor in bucket}


def written(model: MegatronModel, folder: Path, form: Any, saver: ModelSaver) -> None:
    for part in ("weights", "optimizer"):
        (folder / part).mkdir(parents=True)
    for save in (saver.weights(model, folder / "weights"), saver.optimizer(model, folder / "optimizer", form)):
        save.write()
        save.finish()


def checkpoints(role: str, dtype: str, folder: Path, shape: ModelArchitecture = SHAPE) -> dict[str, Any]:
    """For each pair of writer and reader, and both formats: tensors that differ, and gradient norms of the next two updates."""
    parallel = initialize_parallel(ParallelConfig(world_size=1))
    found: dict[str, Any] = {}
    for writer in ("te", "sdpa"):
        model = build(role, parallel, dtype=dtype, attention=writer, shape=shape)
        update(model, parallel, UPDATES)
        extra = [name for name in weights_state(model.chunks)["chunk0"] if name.endswith("_extra_state")]
        saver = ModelSaver()
        for form in ("fully_reshardable", "dp_reshardable"):
            written(model, folder / f"{role}_{dtype}_{writer}_{form}", form, saver)
        before = exported(model, parallel)
        saver.pool.clear()
        follow = update(model, parallel, 2)
        for reader in ("te", "sdpa"):
            for form in ("fully_reshardable", "dp_reshardable"):
                other = build(role, parallel, dtype=dtype, attention=reader, shape=shape)
                source = folder / f"{role}_{dtype}_{writer}_{form}"
                load_weights(other, source / "weights")
                after = exported(other, parallel)
                different = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
                load_optimizer(other, source / "optimizer", form, UPDATES)  # type: ignore[arg-type]
                found[f"{writer}-{reader}-{form}"] = {
                    "different": different,
                    "norms": [follow, update(other, parallel, 2)],
                    "layers": [model.layers, other.layers],
                    "extra_states": len(extra),
                    "keys": len(before),
                }
    return found


def cases(folder: Path) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for dtype in ("float32", "bfloat16"):
        for attention in ("te", "sdpa"):
            found[f"offload {dtype} {attention}"] = partial(step_worker.run_case, {"dtype": dtype, "attention": attention}, 1)
        for role in ("policy", "critic"):
            found[f"checkpoint {role} {dtype}"] = partial(checkpoints, role, dtype, folder)
    for role in ("policy", "critic"):
        found[f"checkpoint mixture {role} float32"] = partial(checkpoints, role, "float32", folder / "mixture", MIXTURE)
    return found


def main() -> None:
    torch.set_num_threads(1)
    file, only = Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    results: dict[str, Any] = {"workspace": get_cublas_workspace_size_bytes()}
    for name, run in cases(file.parent).items():
        if only in name.replace(" ", "_"):
            results[name] = run()
            release_groups()
            file.write_text(json.dumps(results | {"faults": fake_cuda.FAULTS, "calls": dict(te_reference.CALLS)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
