"""Compare the weight sync of the policy into vLLM with a memcpy of its bytes.

    python benchmarks/weight_sync.py [--model FOLDER] [--rounds 5]
    torchrun --nproc-per-node 2 benchmarks/weight_sync.py --pp 2

Prints one JSON line with medians. ``export_ratio``: time of the trainer's side (export, transfers between ranks, checks of names and
shapes) over a memcpy of the full HF tensors on one thread. ``load_ratio``: the same for vLLM's loading, which repacks every matrix on CPU.
``verify_seconds``: additional time for checksums of all tensors on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from conversion import model_folder
from torch import Tensor

from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import ModelConfig, ParallelConfig, RolloutConfig, VllmConfig
from vapo_mcore.megatron.model import build_chunks
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.rollout.factory import build_rollout_engine
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.export import Exporter
from vapo_mcore.weights.loader import load_hf_into


def memcpy_seconds(tensors: list[Tensor], rounds: int) -> float:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    taken = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree; start as many processes with torchrun")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree of the policy")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as work:
        parallel = initialize_parallel(
            ParallelConfig(world_size=world, tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp)
        )
        folder = model_folder(options.model, Path(work))
        arch = read_architecture(folder)
        chunks = build_chunks("policy", arch, ModelConfig(path=str(folder), dtype="bfloat16"), parallel)
        load_hf_into(chunks, folder, arch, parallel, role="policy")
        exporter = Exporter(chunks, arch, parallel, role="policy")
        rollout = RolloutConfig(engine="vllm", max_response_length=32, vllm=VllmConfig(kv_cache_gib=0.1, max_num_seqs=8))
        layout = {"tensor_parallel_size": options.tp, "rank": dist.get_rank(), "world_size": world}
        engine = build_rollout_engine(rollout, folder, torch.bfloat16, **layout, max_model_len=64, seed=0)
        copied = memcpy_seconds([tensor.clone() for bucket in exporter.buckets() for _, tensor in bucket], options.rounds)
        exports, loads, verifications = [], [], []
        for number in range(options.rounds + 1):
            engine.wake_weights()
            report = engine.update_weights(exporter.buckets(), exporter.names)
            exports.append(report.seconds - report.load_seconds)
            loads.append(report.load_seconds)
            begin = time.perf_counter()
            if number < 2:
                for _ in range(2):
                    checked = {name: tensor_checksum(tensor) for bucket in exporter.buckets() for name, tensor in bucket}
                    assert len(checked) == report.names
                verifications.append(time.perf_counter() - begin)
            engine.sleep()
        export, load = statistics.median(exports[1:]), statistics.median(loads[1:])
        if dist.get_rank() == 0:
            line = {
                "benchmark": "weight_sync",
                "tp": options.tp,
                "pp": options.pp,
                "megabytes": round(report.bytes / 1e6),
                "memcpy_seconds": round(copied, 4),
                "export_seconds": round(export, 4),
                "vllm_load_seconds": round(load, 4),
                "export_ratio": round(export / copied, 2),
                "load_ratio": round(load / copied, 2),
                "verify_seconds": round(verifications[-1], 4),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
