"""Measure the stall of an asynchronous checkpoint relative to a synchronous one with fsync.

    python benchmarks/checkpoint.py [FOLDER] [key=value ...]

Saves policy and critic of the SmolLM2-135M recipe with AdamW state, in one process, with the trainer's ``Checkpointer``. Files go to FOLDER
(default: the current one), which must not be in memory. Prints one JSON object. The stall is the time that the main thread spends in begin,
commit and poll until the checkpoint is published; between the polls, matrix products simulate training steps.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from conversion import model_folder

from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.config import Config, load_config
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.models import build_models

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "smollm2_135m_chain_sum.yaml"
STATE = {"objects": {"trainer": {"rollouts": 1}}, "files": {}, "run_id": "benchmark"}
REPEATS = 3


def first_update(model: MegatronModel) -> None:
    """Allocate the optimizer state. The gradients are zero, so the weights do not change."""
    for chunk in model.wrapped:
        chunk.zero_grad_buffer()
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    assert model.optimizer is not None
    model.optimizer.step()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def settle(checkpointer: Checkpointer) -> None:
    """Wait until the writer thread has finished its work after a save (deleting older checkpoints)."""
    checkpointer._writer.submit(lambda: None).result()


def main() -> None:
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=sys.argv[1] if len(sys.argv) > 1 else "."))
    try:
        settings = "checkpoint={keep_last: 1, reshardable_every: 0}"
        model = f"model.path={model_folder(None, base)}"
        config = load_config(RECIPE, [model, f"run.dir={base}", "critic.value_pretraining.steps=0", settings, *sys.argv[2:]])
        print(json.dumps(measure(config, base)), flush=True)
    finally:
        shutil.rmtree(base)


def measure(config: Config, base: Path) -> dict[str, object]:
    parallel = initialize_parallel(config.parallel)
    models = build_models(config, parallel, lambda _: None)
    assert models.critic is not None
    for model in (models.policy, models.critic):
        first_update(model)
    failures: list[str] = []
    checkpointer = Checkpointer(config, parallel, models, lambda line: failures.append(line) if "failed" in line else None)
    matrix = torch.randn(1024, 1024)

    def step() -> None:
        for _ in range(4):
            matrix @ matrix

    synchronous, stalls, parts, alone, writing = [], [], [], [], []
    for _ in range(REPEATS + 1):  # the first repeat allocates the buffers and is not counted
        synchronous.append(timed(lambda: (checkpointer.begin("rl", 1), checkpointer.commit(STATE, {}), checkpointer.wait())))
        settle(checkpointer)
        alone.append(timed(lambda: [step() for _ in range(5)]) / 5)
        begin = timed(lambda: checkpointer.begin("rl", 2))
        commit = timed(lambda: checkpointer.commit(STATE, {}))
        poll, steps = 0.0, []
        while checkpointer.under_way:
            steps.append(timed(step))
            poll += timed(checkpointer.poll)
        settle(checkpointer)
        stalls.append(begin + commit + poll)
        parts.append((begin, commit, poll))
        writing.append(statistics.fmean(steps))
        assert not failures, failures
    assert checkpointer.published == ("rl", 2)
    checkpointer.close()
    sync, stall = statistics.median(synchronous[1:]), statistics.median(stalls[1:])
    files = [path for path in (base / "checkpoints" / "step_000002").rglob("*") if path.is_file()]
    return {
        "benchmark": "checkpoint",
        "dtype": config.model.dtype,
        "bytes": sum(path.stat().st_size for path in files),
        "buffers_bytes": checkpointer._saver.pool.num_bytes,
        "synchronous_seconds": round(sync, 3),
        "asynchronous_stall_seconds": round(stall, 3),
        "stall_share": round(stall / sync, 4),
        "begin_commit_poll_seconds": [round(statistics.median(part[1:]), 3) for part in zip(*parts, strict=True)],
        "first_stall_seconds": round(stalls[0], 3),
        "step_seconds_alone": round(statistics.median(alone[1:]), 4),
        "step_seconds_while_writing": round(statistics.median(writing[1:]), 4),
    }


if __name__ == "__main__":
    main()
