"""torchrun worker: real Megatron models load HF folders and export them again, bit for bit. Prints "case NAME ok" for each case.

torchrun --nproc-per-node 4 worker.py WORKDIR
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vapo_mcore.config.architecture import ModelArchitecture, ValueBins, read_architecture
from vapo_mcore.config.schema import ModelConfig, ParallelConfig
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.host import megatron_scope
from vapo_mcore.megatron.model import build_chunks
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_mcore.weights.export import Exporter, save_hf
from vapo_mcore.weights.loader import load_hf_into
from vapo_mcore.weights.verify import check_own_checksums

WORK = Path(sys.argv[1])
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp4": {"tensor_model_parallel_size": 4},
    "pp2_vpp2_dp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "tp2_cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
}


def load(
    folder: Path,
    parallel: ParallelContext,
    role: Any = "policy",
    head_init: Any = None,
    dtype: str = "bfloat16",
    arch: ModelArchitecture | None = None,
) -> list[Any]:
    arch = arch or read_architecture(folder)
    chunks = build_chunks(role, arch, ModelConfig(path=str(folder), dtype=dtype), parallel)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    load_hf_into(chunks, folder, arch, parallel, role=role, head_init=head_init, seed=3)
    assert not any(parameter.isnan().any() for chunk in chunks for parameter in chunk.parameters())
    return chunks


def checkpoint(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def require_equal(exported: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert exported.keys() == expected.keys(), exported.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name


def collected(exporter: Exporter) -> dict[str, Tensor]:
    named = [(name, tensor.clone()) for bucket in exporter.buckets() for name, tensor in bucket]
    assert [name for name, _ in named] == exporter.names
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named} == exporter.manifest
    return dict(named)


def case_every_model_comes_back(parallel: ParallelContext) -> None:
    """Tied and untied, biases, QK norm, one key-value head (fewer than TP ranks), odd vocabulary; buckets that hold a few rows (all
    matrices go in pieces), some tensors, everything."""
    for folder in sorted(WORK.glob("model_*")):
        chunks = load(folder, parallel)
        for bucket_bytes in (5_000, 40_000, 1 << 30):
            exporter = Exporter(chunks, read_architecture(folder), parallel, role="policy", bucket_bytes=bucket_bytes)
            require_equal(collected(exporter), checkpoint(folder))


def case_critic(parallel: ParallelContext) -> None:
    """Trunk of a tied policy in bfloat16 with a float32 head that is the same on all ranks."""
    folder = WORK / "model_qwen2_tied"
    exported: dict[str, Tensor] = {}
    chunks = load(folder, parallel, "critic", "small")
    for bucket in Exporter(chunks, read_architecture(folder), parallel, role="critic", bucket_bytes=10_000).buckets():
        exported.update((name, tensor.clone()) for name, tensor in bucket)
    weight, bias = exported.pop("score.weight"), exported.pop("score.bias")
    require_equal(exported, checkpoint(folder))
    assert weight.dtype == bias.dtype == torch.float32
    assert weight.std() > 0
    assert bias.item() == 0.0
    checksums: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(checksums, tensor_checksum(weight))
    assert len(set(checksums)) == 1


def case_repeated_exports_follow_the_weights(parallel: ParallelContext) -> None:
    """Three exports with changing weights and parameter storage moved in between (as offload does): checksums right each time."""
    folder = WORK / "model_qwen3"
    chunks = load(folder, parallel)
    exporter = Exporter(chunks, read_architecture(folder), parallel, role="policy", bucket_bytes=20_000)
    expected = checkpoint(folder)
    for factor in (1.0, 2.0, -0.5):
        expected = {name: tensor * factor for name, tensor in expected.items()}
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data = (parameter * factor).clone()
        received = {name: tensor_checksum(tensor) for bucket in exporter.buckets() for name, tensor in bucket}
        assert received == {name: tensor_checksum(tensor) for name, tensor in expected.items()}


class StorageMeter(TorchDispatchMode):
    """Bytes of tensor storages made inside the mode and still alive: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in before | self.alive:
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage.data_ptr()
        if key:
            self.alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def case_temporary_memory_is_about_one_bucket(parallel: ParallelContext) -> None:
    folder = WORK / "model_qwen3"
    largest_group = 2 * 96 * 64 * 2  # gate and up in bfloat16; the fused QKV has as many rows
    bucket_bytes = 4 * largest_group
    chunks, arch = load(folder, parallel), read_architecture(folder)
    exporter = Exporter(chunks, arch, parallel, role="policy", bucket_bytes=bucket_bytes)
    with StorageMeter() as meter:
        for bucket in exporter.buckets():
            assert sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes / 3
            del bucket
    communicates = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size > 1
    assert meter.peak > (largest_group if communicates else 0)  # the meter does measure
    assert meter.peak <= bucket_bytes, meter.peak
    small_bucket = largest_group // 2
    exporter = Exporter(chunks, arch, parallel, role="policy", bucket_bytes=small_bucket)
    with StorageMeter() as meter:
        for bucket in exporter.buckets():
            del bucket
    assert meter.peak <= largest_group + small_bucket, meter.peak  # a group's own tensors are whole


def case_saved_folder(parallel: ParallelContext) -> None:
    """The saved policy loads in plain transformers and equals the source; an existing folder is refused on every rank."""
    source, target = WORK / "model_qwen2", WORK / f"saved_{os.environ['CASE_LAYOUT']}"
    exporter = Exporter(load(source, parallel), read_architecture(source), parallel, role="policy", bucket_bytes=20_000)
    save_hf(exporter, source, target, max_shard_bytes=60_000)
    assert len(list(target.glob("*.safetensors"))) > 2
    require_equal(checkpoint(target), checkpoint(source))
    assert check_own_checksums(target).equal
    config = json.loads((target / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    try:
        save_hf(exporter, source, target)
        raise AssertionError("an existing folder was overwritten")
    except CheckpointError as error:
        assert "already exists" in str(error)
    assert before == {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    save_hf(exporter, source, WORK / f"saved32_{os.environ['CASE_LAYOUT']}", dtype=torch.float32)
    widened = {name: tensor.float() for name, tensor in checkpoint(source).items()}
    require_equal(checkpoint(WORK / f"saved32_{os.environ['CASE_LAYOUT']}"), widened)


def case_saved_critic_loads_back(parallel: ParallelContext) -> None:
    """A critic's folder gives the same critic again, head included, from the folder alone."""
    source, target = WORK / "model_qwen2", WORK / f"critic_{os.environ['CASE_LAYOUT']}"
    chunks = load(source, parallel, "critic", "small")
    first = Exporter(chunks, read_architecture(source), parallel, role="critic")
    with torch.no_grad():
        for head in (chunk.output_layer for chunk in chunks if chunk.post_process):
            head.bias.fill_(0.25)
    save_hf(first, source, target)
    again = Exporter(load(target, parallel, "critic"), read_architecture(target), parallel, role="critic")
    expected = collected(first)
    assert expected["score.bias"].item() == 0.25
    require_equal(collected(again), expected)
    require_equal(checkpoint(target), expected)


def case_saved_critic_with_two_layers_loads_back(parallel: ParallelContext) -> None:
    """Its folder says what the head is and its bins; the first layer is random, so that a gradient reaches it from a zero last layer."""
    source, target = WORK / "model_qwen2_tied", WORK / f"mlp_critic_{os.environ['CASE_LAYOUT']}"
    architecture = replace(read_architecture(source), mlp_value_head=True, value_bins=ValueBins(-0.2, 1.2, 11, 0.75))
    first = Exporter(load(source, parallel, "critic", "zero", arch=architecture), architecture, parallel, role="critic")
    expected = collected(first)
    assert not expected["score.out.weight"].any()
    dense = expected["score.dense.weight"]
    assert abs(dense.std().item() * dense.shape[0] ** 0.5 - 1) < 0.1
    save_hf(first, source, target)
    assert read_architecture(target) == architecture
    again = Exporter(load(target, parallel, "critic"), architecture, parallel, role="critic")
    require_equal(collected(again), expected)
    require_equal(checkpoint(target), expected)


def case_checkpoints_of_megatron_and_of_the_converter(parallel: ParallelContext) -> None:
    """``dist_checkpointing`` loads in this layout what the converter wrote without one, and the converter reads what
    ``dist_checkpointing`` saved in this layout. Vocabulary paddings differ on both ways."""
    from megatron.core import dist_checkpointing

    mlp_critic = WORK / f"mlp_critic_{os.environ['CASE_LAYOUT']}"
    folders = {name: WORK / f"model_{name}" for name in ("qwen2", "qwen2_tied", "qwen3")} | {"mlp_critic": mlp_critic}
    for name, role in (("qwen2", "policy"), ("qwen2_tied", "policy"), ("qwen3", "critic"), ("mlp_critic", "critic")):
        source = folders[name]
        converted, saved, back = (WORK / f"{kind}_{name}_{os.environ['CASE_LAYOUT']}" for kind in ("converted", "saved", "back"))
        chunks = load(source, parallel, role, "small" if name == "qwen3" else None)
        exporter = Exporter(chunks, read_architecture(source), parallel, role=role)  # type: ignore[arg-type]
        expected = collected(exporter)
        if role == "policy":
            if dist.get_rank() == 0:
                hf_to_megatron(source, converted, vocab_multiple=3)
            dist.barrier()
            with torch.no_grad(), megatron_scope():
                for chunk in chunks:
                    for parameter in chunk.parameters():
                        parameter.fill_(7.0)
                dist_checkpointing.load(sharded_state_dict(chunks), str(converted))
            require_equal(collected(exporter), expected)
        saved.mkdir(exist_ok=True)
        with megatron_scope():
            dist_checkpointing.save(sharded_state_dict(chunks), str(saved))
        if dist.get_rank() == 0:
            megatron_to_hf(saved, back, config=source, max_shard_bytes=50_000)
            require_equal(checkpoint(back), expected)


def sharded_state_dict(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


CASES: list[Callable[[ParallelContext], None]] = [
    case_every_model_comes_back,
    case_critic,
    case_repeated_exports_follow_the_weights,
    case_temporary_memory_is_about_one_bucket,
    case_saved_folder,
    case_saved_critic_loads_back,
    case_saved_critic_with_two_layers_loads_back,
    case_checkpoints_of_megatron_and_of_the_converter,
]


def main() -> None:
    for layout, degrees in LAYOUTS.items():
        os.environ["CASE_LAYOUT"] = layout
        parallel = initialize_parallel(ParallelConfig(world_size=dist_world_size(), timeout_minutes=2, **degrees))  # type: ignore[arg-type]
        for case in CASES:
            case(parallel)
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"case {layout} {case.__name__} ok", flush=True)
    dist.destroy_process_group()


def dist_world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
