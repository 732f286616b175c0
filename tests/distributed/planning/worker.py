"""worker.py CASE... (test_planning.py): what four real processes hold, and what the plan says they would; one JSON line a case.

State is read from the storages of the offloader. Activations are what torch's allocator hands out during a forward and backward
pass, from the profiler's memory events: neither is counted by the code under test.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed import distributed_c10d

from tests.settings import config_of
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import Config
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron import host
from vapo_mcore.megatron.engine import MegatronModel, choices_name
from vapo_mcore.megatron.losses import CriticLoss, PolicyLoss
from vapo_mcore.megatron.offload import Residency, release_gather_buffers
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed, initialize_parallel
from vapo_mcore.megatron.routing import Routing
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.planning.devices import DEVICES
from vapo_mcore.planning.measure import (
    ActivationProbe,
    ChunkActivations,
    build_state,
    forward_peak,
    pipeline_rank,
    run_chunks,
    training_peak,
)
from vapo_mcore.planning.state import Role, cpu_offload, model_state, offload_host_bytes, reduction_copy_bytes

TINY = replace(find_architecture("qwen2.5-0.5b"), num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4)
TINY = replace(TINY, num_key_value_heads=2, head_dim=32, vocab_size=1003, tie_word_embeddings=False)
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
INTERLEAVED = {**LAYOUT, "virtual_pipeline_model_parallel_size": 2}
TINY_MIXTURE = replace(find_architecture("qwen3-30b-a3b"), num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
TINY_MIXTURE = replace(TINY_MIXTURE, head_dim=32, vocab_size=1003, num_experts=8, num_experts_per_token=2, moe_ffn_hidden_size=64)
EXPERTS = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
SMOLLM2 = find_architecture("smollm2-135m")
SMOLLM2_WIDE = replace(SMOLLM2, num_layers=2, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_key_value_heads=32)
"""SmolLM2-1.7B (its published config.json) with 2 of its 24 layers."""
CASES: dict[str, tuple[ModelArchitecture, str, str, dict[str, Any], int]] = {
    # name: architecture, dtype, recompute, layout, tokens of a micro-batch
    "tiny": (TINY, "float32", "none", LAYOUT, 512),
    "tiny_bfloat16_selective": (TINY, "bfloat16", "selective", LAYOUT, 512),
    "tiny_tied_interleaved_full": (
        replace(TINY, tie_word_embeddings=True),
        "bfloat16",
        "full",
        INTERLEAVED,
        512,
    ),
    "tiny_data_parallel": (TINY, "bfloat16", "none", {"pipeline_model_parallel_size": 2}, 512),
    "tiny_full": (TINY, "float32", "full", LAYOUT, 512),
    "tiny_interleaved": (TINY, "bfloat16", "none", INTERLEAVED, 1024),
    "tiny_mixture": (TINY_MIXTURE, "float32", "none", EXPERTS, 512),
    "tiny_mixture_whole_experts_selective": (TINY_MIXTURE, "bfloat16", "selective", {**EXPERTS, "expert_tensor_parallel_size": 1}, 512),
    # SmolLM2-135M has 9 heads and 3 key-value heads, which tensor parallelism of 2 does not divide; those of the 1.7B it does.
    "smollm2": (SMOLLM2, "bfloat16", "none", {"pipeline_model_parallel_size": 2}, 128),
    "smollm2_tp3_pp2": (SMOLLM2, "bfloat16", "none", {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2}, 144),
    "smollm2_1.7b_two_layers": (SMOLLM2_WIDE, "bfloat16", "none", LAYOUT, 128),
}
MICROBATCHES, SEQUENCES = 4, 4


ON_CPU = ("tiny_data_parallel",)
"""Cases whose critic has its optimizer on the CPU."""


def make_config(name: str) -> Config:
    _, dtype, recompute, layout, tokens = CASES[name]
    return config_of(
        {
            "run": {"dir": "unused", "steps": 1},
            "model": {"path": "unused", "dtype": dtype, "recompute": recompute},
            "parallel": {"world_size": 6 if layout.get("tensor_model_parallel_size") == 3 else 4, **layout},
            "batch": {"prompts_per_step": 16, "responses_per_prompt": 4, "mini_batch_size": 32, "max_tokens_per_microbatch": tokens},
            "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum", "size": 1}], "max_prompt_length": 8},
            "rollout": {"max_response_length": tokens // 4 - 8},
            "critic": {"optimizer": {"cpu_offload": name in ON_CPU}},
        }
    )


def microbatches(config: Config, parallel: ParallelContext, names: tuple[str, ...]) -> list[MicroBatch]:
    result = []
    for _ in range(MICROBATCHES):
        lengths = [config.batch.max_tokens_per_microbatch // SEQUENCES] * SEQUENCES
        layout = ThdLayout(lengths, tensor_parallel_size=parallel.tensor_model_parallel_size)
        count = sum(lengths)
        tensors = {name: torch.rand(count) for name in names}
        tensors |= {"tokens": torch.randint(0, 1000, (count,)), "response_mask": torch.ones(count, dtype=torch.bool)}
        result.append(MicroBatch(layout, torch.arange(SEQUENCES), tensors))
    return result


def even_choices(batch: MicroBatch, routing: Routing) -> Tensor:
    """Choices that give every expert equally many tokens of every rank, as `plan` assumes: uint8 [tokens, layers, topk]."""
    pairs = torch.arange(batch.layout.num_tokens * routing.topk) % routing.experts
    return pairs.to(routing.dtype).view(-1, 1, routing.topk).expand(-1, len(routing.routers), -1).contiguous()


def _gloo_states() -> list[str]:
    """Return the scheduler's states of gloo's threads, "S" for asleep."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def _wait_for_gloo() -> None:
    """Return when no thread of gloo runs or could run: after a collective it drops its tensors before it sleeps again."""
    asleep, deadline = 0, time.monotonic() + 30
    states: list[str] = []
    while time.monotonic() < deadline:
        time.sleep(0.0002)
        states = _gloo_states()
        asleep = asleep + 1 if states and set(states) == {"S"} else 0
        if asleep == 2:
            return
    raise TimeoutError(f"gloo's threads (pt_gloo...) did not sleep within 30 s; their states: {states}")


def let_go_before_returning() -> None:
    """Collectives return when gloo's thread no longer holds their tensors: a block that it frees is not among the events of this thread."""
    host.import_megatron()  # before anything is replaced
    from megatron.core.models.gpt import gpt_model  # noqa: F401
    from megatron.core.tensor_parallel import layers, mappings

    class Settled:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self, *args: Any) -> Any:
            finished = self.work.wait(*args)
            _wait_for_gloo()
            return finished

    def settled(original: Any) -> Any:
        """The collective, whose work this thread drops last, so that it frees what the work holds."""
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            work = original(**{**given, "async_op": True})
            if work is None or given.get("async_op", False):
                return work and Settled(work)
            if not isinstance(work, distributed_c10d._IllegalWork):  # those of a coalescing context start at its end
                Settled(work).wait()
            return None

        return call

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "all_to_all_single", "broadcast"):
        setattr(dist, name, settled(getattr(dist, name)))
    for name in ("_EQUAL_GATHER", "_EQUAL_SCATTER"):  # what Megatron's gathers of tensor lists call
        setattr(host, name, settled(getattr(host, name)))
    for module in (layers, mappings):
        module.dist_all_gather_func = dist.all_gather_into_tensor
        module.dist_reduce_scatter_func = dist.reduce_scatter_tensor


def allocated_peak(function: Any) -> int:
    """Largest sum of what was allocated and not freed since the call began, from the allocator's own events.

    The smallest of three times counts: an exchange between pipeline stages may still run when the next one begins, and a free that
    the profiler misses makes the sum too large until the address is allocated again.
    """
    return min(_allocated_peak(function) for _ in range(3))


def _allocated_peak(function: Any) -> int:
    release_gather_buffers()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    events: list[tuple[int, int, int]] = []
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    assert events
    current = peak = 0
    live: dict[int, int] = {}
    for _, size, address in sorted(events):
        current -= live.pop(address, 0)  # freed, now or unseen before; what is older than the call does not count
        if size > 0:
            live[address] = size
            current += size
        peak = max(peak, current)
    return peak


def measure(config: Config, arch: ModelArchitecture, parallel: ParallelContext) -> dict[str, Any]:
    """This rank's bytes."""
    residency = Residency(enabled=True)
    losses: dict[str, Any] = {"policy": PolicyLoss(config), "critic": CriticLoss(None)}
    facts: dict[str, Any] = {"stage": parallel.pipeline_model_parallel_rank, "data": parallel.data_parallel_rank}

    @torch.no_grad()
    def fill(chunks: list[Any]) -> None:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.normal_(std=0.02)

    for role, loss in losses.items():
        optimizer = getattr(config, role).optimizer
        model = MegatronModel(role, arch, config.model, parallel, load_weights=fill, optimizer=optimizer)  # type: ignore[arg-type]
        residency.add(model)
        batches = microbatches(config, parallel, loss.tensors)
        if model.routing is not None:
            name = choices_name(role)  # type: ignore[arg-type]
            batches = [batch.with_tensors(**{name: even_choices(batch, model.routing)}) for batch in batches]
        residency.enter(f"{role}_update")  # type: ignore[arg-type]
        assert not model.train_step(batches, loss).skipped
        residency.mark_changed(role)
        facts[role] = residency.offloaders[role].device_bytes()
        facts[f"{role}_train"] = allocated_peak(lambda m=model, b=batches, loss=loss: m.accumulate(b, loss))
        outputs = ("logprobs", "entropy") if role == "policy" else ("values",)
        facts[f"{role}_forward"] = allocated_peak(lambda m=model, b=batches, o=outputs: m.forward(b, outputs=o))
    residency.enter("generate")
    facts["host"] = residency.host_bytes()
    return facts


def predict(config: Config, arch: ModelArchitecture) -> dict[str, Any]:
    """The same of every pipeline stage, by data-parallel rank, without a world."""
    parallel = config.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    lengths = [config.batch.max_tokens_per_microbatch // SEQUENCES] * SEQUENCES
    probe = ActivationProbe()
    result: dict[str, Any] = {"host": offload_host_bytes(config, arch), "stages": []}
    for stage in range(stages):
        facts: dict[str, Any] = {}
        for role in ("policy", "critic"):
            with pipeline_rank(parallel, stage) as context:
                built = build_state(config, role, arch, context, on_gpu=False)  # type: ignore[arg-type]
                whole = run_chunks(config, role, arch, context, lengths, on_gpu=False)  # type: ignore[arg-type]
            alone = model_state(arch, role, config.model.dtype, parallel, stage=stage, overlap=False, cpu_offload=cpu_offload(config, role))  # type: ignore[arg-type]
            probed = [_probed(probe, config, role, arch, lengths, stage, number) for number in range(virtual)]  # type: ignore[arg-type]
            facts[role] = [{"params": s.params, "grads": s.grads, "optimizer": s.optimizer} for s in built.by_data_rank]
            facts[f"{role}_same"] = [list(built.by_data_rank) == alone, all(map(_alike, probed, whole))]
            reduction = reduction_copy_bytes(arch, role, config.model.dtype, parallel, stage=stage)  # type: ignore[arg-type]
            facts[f"{role}_train"] = max(training_peak(whole, stage, stages, MICROBATCHES)[0], reduction)
            facts[f"{role}_forward"] = forward_peak(whole)[0]
        result["stages"].append(facts)
    return result


def _alike(probed: ChunkActivations, whole: ChunkActivations) -> bool:
    """All equal but for the peak, which may be a little high where a few layers peak elsewhere than many."""
    return replace(probed, peak=whole.peak) == whole and whole.peak <= probed.peak <= 1.05 * whole.peak


def _probed(
    probe: ActivationProbe, config: Config, role: Role, arch: ModelArchitecture, lengths: list[int], stage: int, number: int
) -> Any:
    parallel = config.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    first, last = stage == 0 and number == 0, stage == stages - 1 and number == virtual - 1
    layers = arch.num_layers // (stages * virtual)
    return probe.chunk(config, role, arch, lengths, first=first, last=last, layers=layers, on_gpu=DEVICES["cpu"].is_gpu)


def _settled(rank: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Peaks as the smallest of the tensor-parallel peers, which hold the same: a free that was not seen makes a sum too large."""
    peers = [peer for peer in ranks if (peer["stage"], peer["data"]) == (rank["stage"], rank["data"])]
    names = [f"{role}_{what}" for role in ("policy", "critic") for what in ("train", "forward")]
    return rank | {name: min(peer[name] for peer in peers) for name in names}


def main() -> None:
    torch.set_num_threads(1)
    initialize_distributed(5)
    let_go_before_returning()
    rank = dist.get_rank()
    measured: dict[str, list[Any]] = {}
    chosen = {name: CASES[name] for name in sys.argv[1:]}
    for name, (arch, *_) in chosen.items():
        config = make_config(name)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, measure(config, arch, initialize_parallel(config.parallel)))
        measured[name] = [_settled(rank, ranks) for rank in ranks]
    dist.destroy_process_group()
    if rank == 0:
        for name, (arch, *_) in chosen.items():
            print(json.dumps({"case": name, "ranks": measured[name], "plan": predict(make_config(name), arch)}), flush=True)


if __name__ == "__main__":
    main()
