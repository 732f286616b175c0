"""Check that one GPU computes the same numbers as the CPU, and measure its speed, in a few minutes.

    python benchmarks/gpu_step.py                  on a machine with a CUDA device (about two minutes on a data-centre card)
    python benchmarks/gpu_step.py --small          tiny model on any device, for CI

Prints JSON lines: ``parity`` (differences of log-probs, loss and gradient norm between GPU and CPU, float32 without TF32), ``train_step``
(tokens/s and model FLOPs utilisation of a bfloat16 model), ``offload`` (GB/s in each direction, bytes left on the device),
``logprob_memory`` (peak memory of the log-prob function over the logits' bytes). Needs no files: weights are random, from a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.logprob import vocab_parallel_logprobs
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel

PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 peak of a card whose name contains the key (vendors' data sheets)."""


def architecture(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> ModelArchitecture:
    return ModelArchitecture(
        family="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=True,
        attention_output_bias=False,
        qk_norm=False,
    )


SMALL = architecture(2, 64, 128, 4, 2, 512)
QWEN_1_5B = architecture(28, 1536, 8960, 12, 2, 151936)


class TokenLoss:
    """Negative log-likelihood (policy) or half squared values (critic), weighted per token."""

    tensors = ("weight",)
    temperature = 1.0
    needs_entropy = False

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        term = -outputs["logprobs"] if "logprobs" in outputs else outputs["values"].square() / 2
        return (term * batch["weight"]).sum(), {}


@torch.no_grad()
def random_weights(chunks: list[Any]) -> None:
    """Fill the weights with numbers drawn on the host, so that they are equal on every device."""
    generator = torch.Generator().manual_seed(0)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
                continue
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def build(role: Any, shape: ModelArchitecture, dtype: Any, parallel: ParallelContext) -> MegatronModel:
    # float32 is used for the comparison with the CPU; Transformer Engine would compute it in TF32.
    settings = ModelConfig(path="unused: weights are random", dtype=dtype, attention="sdpa" if dtype == "float32" else "auto")
    return MegatronModel(
        role, shape, settings, parallel, load_weights=random_weights, optimizer=OptimizerConfig(lr=1e-6, warmup_rollouts=0)
    )


def batches(shape: ModelArchitecture, lengths: list[list[int]], device: torch.device) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    total = sum(map(sum, lengths))
    result = []
    for part in lengths:
        count = sum(part)
        tensors = {
            "tokens": torch.randint(0, shape.vocab_size, (count,), generator=generator),
            "response_mask": torch.ones(count, dtype=torch.bool),
            "weight": torch.full((count,), 1.0 / total),
        }
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        result.append(MicroBatch(ThdLayout(part, device=device), torch.arange(len(part)), moved))
    return result


def parity_numbers(parallel: ParallelContext) -> dict[str, Tensor]:
    model = build("policy", SMALL, "float32", parallel)
    parts = batches(SMALL, [[37, 5, 1], [120, 2], [64]], parallel.device)
    logprobs = torch.cat(model.forward(parts)["logprobs"]).cpu()
    result = model.train_step(parts, TokenLoss())
    return {"logprobs": logprobs, "loss": torch.tensor(result.metrics["loss"]), "grad_norm": torch.tensor(result.grad_norm)}


def parity(parallel: ParallelContext) -> dict[str, Any]:
    """Compare this process's device with a CPU-only process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu.safetensors"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, __file__, "--write-parity", str(path)], env=environment, check=True)
        expected = load_file(path)
    got = parity_numbers(parallel)
    errors = {name: float((got[name].double() - value.double()).abs().max()) for name, value in expected.items()}
    return {"benchmark": "parity", **errors, "equal_to_1e-5": all(error <= 1e-5 for error in errors.values())}


def synchronize() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()


def train_step(shape: ModelArchitecture, lengths: list[list[int]], parallel: ParallelContext) -> tuple[dict[str, Any], MegatronModel]:
    model = build("policy", shape, "bfloat16", parallel)
    parts = batches(shape, lengths, parallel.device)
    seconds = []
    for _ in range(4):
        synchronize()
        begin = time.perf_counter()
        model.train_step(parts, TokenLoss())
        synchronize()
        seconds.append(time.perf_counter() - begin)
    tokens, step = sum(map(sum, lengths)), statistics.median(seconds[1:])
    parameters = sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters())
    attention = sum(
        6 * length * length * shape.num_attention_heads * shape.head_dim * shape.num_layers for part in lengths for length in part
    )
    flops = 6 * (parameters - shape.vocab_size * shape.hidden_size) * tokens + attention  # the embedding look-up has no FLOPs
    peak = next((value for key, value in PEAK_BF16_FLOPS.items() if key in device_name()), None)
    facts = {"benchmark": "train_step", "parameters": parameters, "tokens": tokens, "seconds": round(step, 4)}
    facts |= {"tokens_per_second": round(tokens / step), "mfu": round(flops / step / peak, 4) if peak else None}
    return facts, model


def offload(policy: MegatronModel, shape: ModelArchitecture, parallel: ParallelContext) -> dict[str, Any]:
    critic = build("critic", shape, "bfloat16", parallel)
    critic.train_step(batches(shape, [[16]], parallel.device), TokenLoss())
    residency = Residency(enabled=True)
    for model in (policy, critic):  # allocates the host buffers; not timed
        residency.add(model)
    with residency.all_resident():
        state = residency.device_bytes()
    left = torch.cuda.memory_allocated() if HAS_CUDA else residency.device_bytes()
    times: dict[str, list[float]] = {"onload": [], "offload": []}
    for _ in range(3):
        for name, stage in (("onload", "policy_update"), ("offload", "generate")):
            if stage == "generate":
                residency.mark_changed("policy")
            moved, begin = (residency.traffic.to_device, residency.traffic.to_host), time.perf_counter()
            residency.enter(stage)  # type: ignore[arg-type]
            took = time.perf_counter() - begin
            change = residency.traffic.to_device - moved[0] + residency.traffic.to_host - moved[1]
            times[name].append(change / took / 1e9)
    rates = {f"{name}_gb_per_second": round(statistics.median(values), 2) for name, values in times.items()}
    return {"benchmark": "offload", "state_bytes": state, "host_bytes": residency.host_bytes(), "bytes_left_on_device": left, **rates}


def logprob_memory(tokens: int, vocab: int, device: torch.device) -> dict[str, Any]:
    logits = torch.randn(tokens, vocab, device=device).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=device)
    if HAS_CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if HAS_CUDA else 0
    logprobs, entropies = vocab_parallel_logprobs(logits, labels, vocab_size=vocab, entropy=True)
    assert entropies is not None
    (logprobs.sum() + entropies.sum()).backward()
    extra = torch.cuda.max_memory_allocated() - before if HAS_CUDA else None
    size = logits.numel() * logits.element_size()
    return {"benchmark": "logprob_memory", "logits_bytes": size, "extra_over_logits": round(extra / size, 3) if extra is not None else None}


def device_name() -> str:
    return torch.cuda.get_device_name() if HAS_CUDA else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--write-parity", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not HAS_CUDA and not arguments.small and not arguments.write_parity:
        parser.error("no CUDA device; --small runs everything on the CPU")
    torch.set_float32_matmul_precision("highest")
    parallel = initialize_parallel(ParallelConfig())
    if arguments.write_parity:
        save_file(parity_numbers(parallel), arguments.write_parity)
        return
    shape, lengths = (SMALL, [[40, 20], [50]]) if arguments.small else (QWEN_1_5B, [[4096, 2048, 1024, 1024]] * 4)
    card = {"device": device_name(), "torch": torch.__version__}
    print(json.dumps(parity(parallel) | card), flush=True)
    facts, policy = train_step(shape, lengths, parallel)
    print(json.dumps(facts | card), flush=True)
    print(json.dumps(offload(policy, shape, parallel) | card), flush=True)
    tokens, vocab = (64, 512) if arguments.small else (8192, 19008)
    print(json.dumps(logprob_memory(tokens, vocab, parallel.device) | card), flush=True)


if __name__ == "__main__":
    main()
