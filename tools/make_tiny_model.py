"""Make the starting model and prompts of the quickstart: a tiny language model that solves additions unreliably.

    python tools/make_tiny_model.py --output models/tiny [--seed 0] [--steps 420] [--slips 0.12] [--processes 2] [--experts 0]

A Qwen2-architecture model of under half a million parameters with a character tokenizer is trained on worked solutions of repeated
additions (addition_task.py) in which each sum is wrong with probability ``--slips``. It learns the procedure, including the slips. With
``--experts 8`` every layer is a mixture (Qwen3-MoE) of that many experts, two of them for a token, together as wide as the dense layer.
The supervised training uses the package's Megatron engine with data parallelism over ``--processes``. The folder contains the model, the
tokenizer, and disjoint ``train.jsonl`` and ``heldout.jsonl``; it is written atomically. Prints the share of right answers on held-out
problems, sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from addition_task import CHARACTERS, Problem, draw_distinct, draw_problem, worked_solution
from toolkit import folder_written_atomically, run, saying

from vapo_mcore.errors import DataError

OWN_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
OWN_FILES |= {"checksums.json", "train.jsonl", "heldout.jsonl", ".made"}
"""Files that an existing ``--output`` may contain and that are replaced; ``.made`` is make's stamp file."""
TRAIN_PROBLEMS, HELDOUT_PROBLEMS = 6000, 400
PAD, EOS = "<pad>", "<eos>"
SEQUENCES = 16
"""Sequences per step and process."""
LEARNING_RATE, WARMUP = 4e-3, 20
SECONDS_BETWEEN_LINES = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=420, help="optimizer steps of the supervised run")
    parser.add_argument("--slips", type=float, default=0.12, help="probability that a sum of the teacher is wrong")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="experts of each layer, 2 for a token; 0: a dense model")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        train(arguments)
        return
    if not 0 <= arguments.slips <= 1 or arguments.steps < 1 or arguments.processes < 1:
        parser.error("--slips must be a probability, --steps and --processes at least 1")
    if arguments.experts != 0 and arguments.experts < 2:
        parser.error("--experts must be 0 (a dense model) or at least 2")
    require_own_folder(arguments.output)
    with folder_written_atomically(arguments.output) as folder:
        with saying(f"making {arguments.output}: random weights"):
            write_untrained(folder / "untrained", arguments.seed, arguments.experts)
        launch_workers(arguments, folder)
        for file in (folder / "trained").iterdir():
            file.rename(folder / file.name)
        for leftover in ("untrained", "trained"):
            for file in (folder / leftover).iterdir():
                file.unlink()
            (folder / leftover).rmdir()
        heldout = write_problems(folder, arguments.seed)
        with saying(f"solving {len(heldout)} held-out problems with the trained model"):
            accuracy, lengths = sampled_accuracy(folder, heldout, arguments.seed)
    print(f"{arguments.output}: {accuracy:.1%} of {len(heldout)} held-out problems right at temperature 1; responses of {lengths} tokens")


def require_own_folder(output: Path) -> None:
    """Raise DataError if replacing ``output`` would delete files that this script did not write."""
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    own = not names or ("heldout.jsonl" in names and "train.jsonl" in names and names <= OWN_FILES)
    if not own or (output.exists() and not output.is_dir()):
        raise DataError(f"{output} exists and is not a folder that this script made; nothing was changed, choose another --output")


def tokenizer() -> Any:
    """Build a tokenizer with one token per character. Without an ``unk_token`` transformers adds its own, an id that the model lacks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token=PAD, eos_token=EOS, unk_token=PAD)


def write_untrained(folder: Path, seed: int, experts: int = 0) -> None:
    """Write a model with random weights and heads of 32, the minimum of vLLM's CPU attention."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    text = tokenizer()
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": len(text),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
    }
    if experts:
        mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **mixture, head_dim=32)).save_pretrained(folder)
    else:
        Qwen2ForCausalLM(Qwen2Config(**common)).save_pretrained(folder)
    text.save_pretrained(folder)


def launch_workers(arguments: argparse.Namespace, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1", __file__]
    for name in ("output", "seed", "steps", "slips", "processes", "experts"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    print(f"supervised training: {arguments.steps} steps in {arguments.processes} processes", flush=True)
    with subprocess.Popen([*command, "--worker", str(folder)], env=environment) as launcher:
        try:
            launcher.wait()
        except BaseException:
            launcher.terminate()  # also terminates the workers, which write into a folder that is about to be deleted
            raise
    if launcher.returncode != 0:
        sys.exit(launcher.returncode)


def train(arguments: argparse.Namespace) -> None:
    """Run one process of the supervised training."""
    with saying("  loading the libraries and the model") if os.environ["RANK"] == "0" else contextlib.nullcontext():
        model, architecture, parallel = build(arguments)
    import torch.distributed as dist

    from vapo_mcore.megatron.losses import SupervisedLoss
    from vapo_mcore.weights.export import Exporter, save_hf

    text = tokenizer()
    rng = random.Random(f"{arguments.seed}/{dist.get_rank()}")
    begin = said = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        batch = supervised_batch(rng, arguments.slips, text)
        result = model.train_step([batch], SupervisedLoss())
        now = time.perf_counter()
        if dist.get_rank() == 0 and (now - said >= SECONDS_BETWEEN_LINES or step in (1, arguments.steps)):
            said = now
            print(f"  supervised step {step}/{arguments.steps}: loss {result.metrics['loss']:.3f}, {now - begin:.0f} s", flush=True)
    exporter = Exporter(model.chunks, architecture, parallel, role="policy")
    save_hf(exporter, arguments.worker / "untrained", arguments.worker / "trained")
    dist.destroy_process_group()


def build(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Build the model with optimizer. Returns model, architecture and process groups."""
    import torch

    from vapo_mcore.config.architecture import read_architecture
    from vapo_mcore.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
    from vapo_mcore.megatron.engine import MegatronModel
    from vapo_mcore.megatron.parallel import initialize_parallel
    from vapo_mcore.weights.loader import load_hf_into

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a worker has nothing to clean up, and may be in a collective
    torch.set_num_threads(1)
    source = arguments.worker / "untrained"
    parallel = initialize_parallel(ParallelConfig(world_size=arguments.processes))
    architecture = read_architecture(source)
    model = MegatronModel(
        "policy",
        architecture,
        ModelConfig(path=str(source), dtype="float32"),
        parallel,
        load_weights=lambda chunks: load_hf_into(chunks, source, architecture, parallel, role="policy"),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, beta2=0.95, weight_decay=0.01, warmup_rollouts=0),
        warmup_updates=WARMUP,
    )
    return model, architecture, parallel


def supervised_batch(rng: random.Random, slips: float, text: Any) -> Any:
    """Build a micro-batch of new problems. The loss weights average over the response tokens of all processes."""
    import torch
    import torch.distributed as dist

    from vapo_mcore.data.microbatch import MicroBatch
    from vapo_mcore.data.thd import ThdLayout

    lengths, tokens, mask = [], [], []
    for _ in range(SEQUENCES):
        problem = draw_problem(rng)
        prompt = text.encode(problem.prompt)
        response = [*text.encode(worked_solution(problem, slip_probability=slips, rng=rng)), text.eos_token_id]
        lengths.append(len(prompt) + len(response))
        tokens += prompt + response
        mask += [False] * len(prompt) + [True] * len(response)
    response_mask = torch.tensor(mask)
    total = response_mask.sum()
    dist.all_reduce(total)
    tensors = {"tokens": torch.tensor(tokens), "response_mask": response_mask, "loss_weights": response_mask / total}
    return MicroBatch(ThdLayout(lengths), torch.arange(SEQUENCES), tensors)


def write_problems(folder: Path, seed: int) -> list[Problem]:
    """Write disjoint ``train.jsonl`` and ``heldout.jsonl``. Returns the held-out problems."""
    rng = random.Random(f"{seed}/problems")
    heldout = draw_distinct(HELDOUT_PROBLEMS, rng)
    training = draw_distinct(TRAIN_PROBLEMS, rng, exclude=set(heldout))
    for name, problems in (("train", training), ("heldout", heldout)):
        rows = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return heldout


def sampled_accuracy(folder: Path, problems: list[Problem], seed: int) -> tuple[float, str]:
    """Return the share of right answers sampled at temperature 1, and the range of response lengths."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer()
    torch.manual_seed(seed)
    prompts = torch.tensor([text.encode(problem.prompt) for problem in problems])  # all prompts have the same length
    sampled = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=180)
    right, lengths = 0, []
    for problem, row in zip(problems, sampled[:, prompts.shape[1] :].tolist(), strict=True):
        response = row[: row.index(text.eos_token_id)] if text.eos_token_id in row else row
        right += text.decode(response).endswith(f"\\boxed{{{problem.answer}}}")
        lengths.append(len(response) + 1)
    return right / len(problems), f"{min(lengths)} to {max(lengths)}"


if __name__ == "__main__":
    run(main)
