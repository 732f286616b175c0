"""Steps of policy and critic in turns, with offload, for one or two processes: ``step_worker.py fake|plain FILE``.

Rank 0 writes a JSON object to FILE: case -> its numbers, and on the fake device what was counted. Without a GPU ``plain`` is what the tests
of the layouts run; its numbers are those that the device's must equal. Two processes also train for a step with two layouts, in the run
directory FILE without its suffix.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FAKE = sys.argv[1] == "fake"
if FAKE:
    from tests import fake_cuda

    fake_cuda.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.fake_cuda.models import LENGTHS, TokenLoss, build, microbatches  # noqa: E402
from tests.process_groups import release_groups  # noqa: E402
from tests.training_setup import repeatable_rows, write_setup  # noqa: E402
from vapo_mcore.config import load_config  # noqa: E402
from vapo_mcore.config.schema import ParallelConfig  # noqa: E402
from vapo_mcore.megatron.offload import Residency  # noqa: E402
from vapo_mcore.megatron.parallel import critic_layout, initialize_parallel  # noqa: E402
from vapo_mcore.trainer.main import train  # noqa: E402

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {},
        "bfloat16, recomputed": {"dtype": "bfloat16", "recompute": "full", "let_go": True},
        "cpu optimizer": {"cpu_offload": True, "let_go": True},
        "head only": {"head_only": True},
    },
    2: {
        "dp": {},
        "tp": {"tensor_model_parallel_size": 2},
        "pp": {"pipeline_model_parallel_size": 2},
        "pp, equal": {"pipeline_model_parallel_size": 2, "equal_microbatches": True},
        "cp": {"context_parallel_size": 2},
        "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "critic at tp": {"critic_layout": {"tensor_model_parallel_size": 2}},
    },
}


def run_case(options: dict[str, Any], world: int) -> dict[str, Any]:
    layout = {name: options.pop(name) for name in list(options) if name.endswith("_size") or name == "equal_microbatches"}
    parallel = initialize_parallel(ParallelConfig(world_size=world, **layout))
    own_layout = options.pop("critic_layout", None)
    of_critic: Any = SimpleNamespace(layouts_differ=own_layout is not None)
    if own_layout is not None:
        of_critic.critic_parallel = ParallelConfig(world_size=world, **own_layout)
    critic_parallel = critic_layout(of_critic, parallel)
    head_only, let_go = options.pop("head_only", False), options.pop("let_go", False)
    counted: dict[str, Any] = {}
    allocated = (lambda: torch.cuda.memory_allocated(parallel.device)) if FAKE else lambda: 0
    before = allocated()
    residency = Residency(enabled=True)
    policy = build("policy", parallel, **options)
    residency.add(policy)
    critic = build("critic", critic_parallel, head_only=head_only, **options)
    residency.add(critic)
    models = {"policy": policy, "critic": critic}
    parts = microbatches(parallel, LENGTHS)
    parts_of = {"policy": parts, "critic": parts if own_layout is None else microbatches(critic_parallel, LENGTHS)}
    own = allocated() - before  # the micro-batches
    numbers: dict[str, Any] = {}
    left = []
    for step in range(2):
        residency.enter("logprobs")
        found = policy.forward(parts, outputs=("logprobs", "entropy"))
        numbers |= {f"{name}{step}": [float(part.double().sum()) for part in found[name]] for name in found}
        residency.enter("values")
        found = critic.forward(parts_of["critic"], outputs=("values", "bootstrap_values"))
        numbers |= {f"{name}{step}": [float(part.double().sum()) for part in found[name]] for name in found}
        del found
        for name in ("critic", "policy"):
            residency.enter(f"{name}_update")  # type: ignore[arg-type]
            if FAKE:
                counted[f"{name} resident"] = residency.device_bytes()
                counted[f"{name} allocated"] = allocated() - before - own
            result = models[name].train_step(parts_of[name], TokenLoss())
            residency.mark_changed(name)
            numbers[f"{name}{step}"] = [result.metrics["loss"], result.grad_norm, str(result.skipped)]
            del result
        residency.enter("generate")
        left.append(allocated() - before - own)
    counted["left"] = left
    if FAKE:
        counted["live"] = fake_cuda.live(parallel.device.index)
        counted["residency"] = residency.device_bytes()
        counted["syncs"] = count_syncs(residency, models, parts)
    if let_go:  # with what they have on the host
        residency.pool.clear()
        assert residency.pool.num_bytes == 0
    else:
        for name in list(residency.offloaders):
            residency.remove(name)
    return {"numbers": numbers, **counted}


def count_syncs(residency: Residency, models: dict[str, Any], parts: list[Any]) -> dict[str, list[dict[str, int]]]:
    """Synchronisations of each kind of pass with the given micro-batches, and with twice as many."""
    found: dict[str, list[dict[str, int]]] = {}
    for name, stage, run in (
        ("policy forward", "logprobs", lambda batches: models["policy"].forward(batches, outputs=("logprobs", "entropy"))),
        ("policy step", "policy_update", lambda batches: models["policy"].train_step(batches, TokenLoss())),
    ):
        residency.enter(stage)  # type: ignore[arg-type]
        found[name] = []
        for batches in (parts, parts + parts):
            with fake_cuda.counted_syncs() as syncs:
                run(batches)
            found[name].append({f"{kind} {place}": count for (kind, place), count in sorted(syncs.items())})
        residency.mark_changed(name.split()[0])
    residency.enter("generate")
    return found


def train_in_two_layouts(run: Path) -> dict[str, Any]:
    """Train for a step with the policy at DP 2 and the critic at TP 2; return the row of its metrics, times and memory left out."""
    folder = run.parent / f"setup_{run.name}"
    if dist.get_rank() == 0:
        write_setup(folder, model="qwen2")
    dist.barrier()
    given = ("critic.parallel.tensor_model_parallel_size=2", "rollout.max_response_length=24", "export.at_end=false", "data.eval=[]")
    others = ("run.steps=1", "model.offload=true", "critic.value_pretraining.steps=1")
    config = load_config(folder / "base.yaml", [f"run.dir={run}", *given, *others])
    assert config.layouts_differ
    train(config, initialize_parallel(config.parallel), clean=False)
    return repeatable_rows(run)[-1]


def main() -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    results = {}
    for name, options in CASES[world].items():
        if len(sys.argv) < 4 or name in sys.argv[3:]:
            results[name] = run_case(dict(options), world)
            release_groups()
    trained = train_in_two_layouts(Path(sys.argv[2]).with_suffix("")) if world == 2 and len(sys.argv) < 4 else None
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, (results, fake_cuda.FAULTS if FAKE else []))
    if dist.get_rank() == 0:
        faults = sorted({fault for _, found in everywhere for fault in found})
        Path(sys.argv[2]).write_text(json.dumps({"faults": faults, "ranks": [found for found, _ in everywhere], "trained": trained}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
