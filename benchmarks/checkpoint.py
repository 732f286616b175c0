"""What a checkpoint costs a training step: the stall of an asynchronous save against a synchronous one with fsync.

``python benchmarks/checkpoint.py [FOLDER]``: policy and critic of SmolLM2-135M's size (random weights, float32, AdamW state) in one
process; files go to FOLDER (default: a temporary folder, which must not be in memory). One JSON object a measurement. Steps stand
for what training does while a save is written: matrix products in the main thread.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vapo_mcore.checkpoint.files import require_space
from vapo_mcore.checkpoint.models import FolderSave, ModelSaver
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import OptimizerConfig
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel

SMOLLM2_135M = ModelArchitecture(
    family="llama",
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope_theta=100000.0,
    rope_scaling=None,
    qkv_bias=False,
    attention_output_bias=False,
    qk_norm=False,
)
REPEATS = 3


def build(role: Any, parallel: ParallelContext) -> MegatronModel:
    settings: Any = SimpleNamespace(dtype="float32", attention="auto", recompute="none")

    def fill(chunks: list[Any]) -> None:
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.normal_()

    model = MegatronModel(role, SMOLLM2_135M, settings, parallel, load_weights=fill, optimizer=OptimizerConfig())
    for chunk in model.wrapped:
        chunk.zero_grad_buffer()
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    assert model.optimizer is not None
    model.optimizer.step()
    return model


def snapshot(saver: ModelSaver, models: list[MegatronModel], target: Path) -> list[FolderSave]:
    """What a step waits for."""
    for model in models:
        for part in ("weights", "optimizer"):
            (target / model.role / part).mkdir(parents=True)
    return [
        save
        for model in models
        for save in (
            saver.weights(model, target / model.role / "weights"),
            saver.optimizer(model, target / model.role / "optimizer", "dp_reshardable"),
        )
    ]


def finish(saves: list[FolderSave]) -> None:
    for save in saves:
        save.finish()


def step(matrix: torch.Tensor) -> None:
    for _ in range(4):
        matrix @ matrix


def main() -> None:
    torch.set_num_threads(1)
    layout = {"world_size": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    layout |= {
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "sequence_parallel": None,
        "timeout_minutes": 5,
    }
    parallel = initialize_parallel(SimpleNamespace(**layout))  # type: ignore[arg-type]
    models = [build(role, parallel) for role in ("policy", "critic")]
    saver = ModelSaver(parallel)
    base = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=sys.argv[1] if len(sys.argv) > 1 else "."))
    try:
        measure(models, saver, base)
    finally:
        shutil.rmtree(base)


def measure(models: list[MegatronModel], saver: ModelSaver, base: Path) -> None:
    matrix = torch.randn(1024, 1024)
    synchronous, stalls, slow, plain = [], [], [], []
    num_bytes = 0
    for repeat in range(REPEATS + 1):  # the first one allocates the buffers and does not count
        start = time.perf_counter()
        saves = snapshot(saver, models, base / f"sync{repeat}")
        for save in saves:
            save.write()
        finish(saves)
        synchronous.append(time.perf_counter() - start)
        num_bytes = sum(save.num_bytes for save in saves)
        shutil.rmtree(base / f"sync{repeat}")
        require_space(base, 2 * num_bytes)

        start = time.perf_counter()
        for _ in range(20):
            step(matrix)
        plain.append((time.perf_counter() - start) / 20)
        with ThreadPoolExecutor(1) as executor:
            start = time.perf_counter()
            saves = snapshot(saver, models, base / f"async{repeat}")
            waited = time.perf_counter() - start
            future = executor.submit(lambda saves=saves: [save.write() for save in saves])
            steps, start = 0, time.perf_counter()
            while not future.done():
                step(matrix)
                steps += 1
            slow.append((time.perf_counter() - start) / max(1, steps))
            future.result()
            start = time.perf_counter()
            finish(saves)
            stalls.append(waited + time.perf_counter() - start)
        shutil.rmtree(base / f"async{repeat}")
    sync, stall = statistics.median(synchronous[1:]), statistics.median(stalls[1:])
    report = {
        "benchmark": "checkpoint",
        "bytes": num_bytes,
        "synchronous_seconds": round(sync, 3),
        "asynchronous_stall_seconds": round(stall, 3),
        "stall_share": round(stall / sync, 4),
        "step_seconds_alone": round(statistics.median(plain[1:]), 5),
        "step_seconds_while_writing": round(statistics.median(slow[1:]), 5),
        "buffers_bytes": saver.pool.num_bytes,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
