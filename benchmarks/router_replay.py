"""Measure what router replay costs: passes of a mixture that record or repeat choices of experts, over the same passes without.

    python benchmarks/router_replay.py [--rounds 7] [--tokens 4096]

A Qwen3-MoE of 4 layers with 32 experts, 4 of them for a token, and a tenth of the width of Qwen3-30B-A3B, in float32 on one process with
one thread. Prints one JSON line per pass with medians of its CPU time over rounds; all variants take turns, except when sampling:

- ``log_prob_pass``: a pass that records (``trainer``), and one that repeats the engine's choices and records what it took (``engine``);
- ``update``: forward and backward passes that repeat recorded choices, without and with recomputed activations;
- ``sampling``: vLLM samples the same responses without and with the return of its choices.

``ratio``: CPU seconds over those without replay. ``bytes_a_token``: of the choices; ``packed_bytes_a_token``: of a rollout's ids,
masks and float32 columns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from vapo_mcore.config.architecture import ModelArchitecture, read_architecture
from vapo_mcore.config.schema import OptimizerConfig, ParallelConfig, RolloutConfig, VllmConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron.engine import MegatronModel, choices_name
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.rollout.base import GenerationRequest, SamplingConfig
from vapo_mcore.weights.loader import load_hf_into

SEQUENCES, VOCAB, PROMPT, RESPONSE = 8, 2048, 64, 128
PACKED_BYTES = 8 + 2 * 1 + 7 * 4  # ids, two masks, seven float32 columns


def write_model(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **experts, head_dim=32, vocab_size=VOCAB, eos_token_id=1, bos_token_id=2, pad_token_id=0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


class SumOfLogProbs:
    """The cheapest loss, so that the passes dominate the time."""

    tensors: tuple[str, ...] = ()
    temperature, needs_entropy = 1.0, False

    def __call__(self, outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = torch.where(batch["mask"], outputs["logprobs"], 0.0).sum() / 1e4
        return loss, {"loss": loss.detach()}


def medians(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each variant; they take turns, so that the machine's noise affects all of them."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            begin = time.process_time()
            run()
            if number:  # the first round warms up
                taken[name].append(time.process_time() - begin)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def report(what: str, seconds: dict[str, float], **more: object) -> None:
    base = seconds["off"]
    line = {"benchmark": "router_replay", "pass": what, "seconds": {name: round(value, 4) for name, value in seconds.items()}}
    print(
        json.dumps(line | {"ratio": {name: round(value / base, 3) for name, value in seconds.items() if name != "off"}} | more), flush=True
    )


def build(folder: Path, arch: ModelArchitecture, parallel: ParallelContext, recompute: str) -> MegatronModel:
    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, folder, arch, parallel, role="policy")

    settings: Any = SimpleNamespace(dtype="float32", attention="auto", recompute=recompute)
    return MegatronModel("policy", arch, settings, parallel, load_weights=load, optimizer=OptimizerConfig(lr=1e-6))


def passes(folder: Path, tokens: int, rounds: int) -> None:
    arch, parallel = read_architecture(folder), initialize_parallel(ParallelConfig(world_size=1))
    shape = arch.expert_choices
    assert shape is not None
    layout = ThdLayout([tokens // SEQUENCES] * SEQUENCES)
    count = layout.num_tokens
    tensors = {"tokens": torch.randint(3, VOCAB, (count,)), "response_mask": torch.ones(count, dtype=torch.bool)}
    plain, name, loss = MicroBatch(layout, torch.arange(SEQUENCES), tensors), choices_name("policy"), SumOfLogProbs()
    model = build(folder, arch, parallel, "none")
    recorded = model.forward([plain], record_choices=True)[name][0]
    given, repeated = plain.with_tensors(**{ENGINE_CHOICES: recorded}), plain.with_tensors(**{name: recorded})
    seconds = medians(
        {
            "off": lambda: model.forward([plain]),
            "trainer": lambda: model.forward([plain], record_choices=True),
            "engine": lambda: model.forward([given], record_choices=True),
        },
        rounds,
    )
    sizes = {"bytes_a_token": shape.bytes_a_token, "packed_bytes_a_token": PACKED_BYTES}
    report("log_prob_pass", seconds, tokens=count, **sizes)
    for recompute in ("none", "full"):
        trained = model if recompute == "none" else build(folder, arch, parallel, recompute)
        updates = {"off": partial(trained.accumulate, [plain], loss), "replay": partial(trained.accumulate, [repeated], loss)}
        report("update", medians(updates, rounds), recompute=recompute, tokens=count)


def sampling(folder: Path, rounds: int) -> None:
    """Time vLLM's own recording. The engine without it is built after the other one is discarded: vLLM allows one per process."""
    from vapo_mcore.rollout.factory import build_rollout_engine
    from vapo_mcore.weights.reader import SafetensorsFolder

    shape = read_architecture(folder).expert_choices
    config = RolloutConfig(engine="vllm", max_response_length=RESPONSE, vllm=VllmConfig(kv_cache_gib=0.25, max_num_seqs=64))
    prompts = torch.randint(3, VOCAB, (8, PROMPT)).tolist()
    requests = [GenerationRequest(f"p{number}", i, ids, 8 * number + i) for number, ids in enumerate(prompts) for i in range(4)]
    engine = build_rollout_engine(
        config,
        folder,
        torch.float32,
        tensor_parallel_size=1,
        max_model_len=PROMPT + RESPONSE,
        rank=0,
        world_size=1,
        seed=0,
        expert_choices=shape,
    )
    with SafetensorsFolder(folder) as files:
        weights = {name: files.read(name) for name in files.shapes}
    seconds: dict[str, float] = {}
    for name in ("engine", "off"):
        if name == "off":
            engine.expert_choices = None
            engine.rebuild()
        engine.wake_weights()
        engine.update_weights(([item] for item in weights.items()), list(weights))
        engine.wake_kv_cache()
        how = SamplingConfig(1.0, 1.0, -1, RESPONSE, return_experts=name == "engine")
        seconds |= medians({name: lambda how=how: engine.generate(requests, how)}, rounds)
    report("sampling", seconds, responses=len(requests), tokens=len(requests) * RESPONSE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the packed batch")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_model(folder)
        passes(folder, options.tokens, options.rounds)
        sampling(folder, options.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
