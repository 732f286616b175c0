"""Compare a whole VAPO step, including the critic, with its plain parts: SmolLM2-135M in bfloat16 on the CPU, in one process.

    python tools/fetch_smollm2.py --output models/smollm2-135m
    python benchmarks/step.py [--model models/smollm2-135m] [--steps 3]

8 prompts x 8 responses of at most 48 tokens, one update of the policy and one of the critic. The step is ``StepRunner.rl_step``, timed from
outside. The plain parts are timed after it in the same process, on the tokens of that step:

- ``generate``: ``vllm.LLM.generate`` on the step's engine with the step's number of tokens per prompt, without seeds and log-probs;
- ``forward``: transformers' models (SDPA) in eight padded batches sorted by length: log-probs of the labels, and values of a linear head;
- ``forward_backward``: the same for both models with backward passes of their losses;
- ``adamw``: ``torch.optim.AdamW`` (foreach) on the same number of float32 parameters, for both models.

Prints one JSON line with medians over the steps. ``ratio``: time of the step over the sum of its plain parts. ``framework_share``: share of
the step outside the phases generate, log-probs, values and updates.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from vapo_mcore.config import load_config
from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import PromptDataset
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.sampling import ResponseSampler
from vapo_mcore.launch.local import become_single_process
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import build_engine, start_verifiers
from vapo_mcore.trainer.models import build_models
from vapo_mcore.trainer.step import StepRunner
from vapo_mcore.weights.sync import WeightSync

PHASES = ("generate", "logprobs", "values", "critic_update", "policy_update")
"""Phases of a step with a plain counterpart; the rest is framework time."""

OVERRIDES = [
    "batch.prompts_per_step=8",
    "batch.responses_per_prompt=8",
    "batch.mini_batch_size=64",
    "rollout.max_response_length=48",
    "critic.value_pretraining.steps=0",
    # too small to change a bfloat16 weight, so that every step samples the same distribution
    "policy.optimizer.lr=1.0e-12",
    "critic.optimizer.lr=1.0e-12",
    "data.eval=[]",
]


class ObservedStepRunner(StepRunner):
    """Keeps the experience of the last step."""

    experience: Experience

    def _collect(self, *args: Any, **kwargs: Any) -> Experience:
        self.experience = super()._collect(*args, **kwargs)
        return self.experience


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


class BareModels:
    """Policy and critic of transformers, with padded batches of a step's sequences."""

    def __init__(self, folder: str) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.critic = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.head = torch.nn.Linear(self.critic.config.hidden_size, 1, bias=False, dtype=torch.bfloat16)

    def take(self, experience: Experience, batches: int = 8) -> None:
        pieces = experience.batch["tokens"].split(experience.cu_seqlens.diff().tolist())
        masks = experience.mask.split(experience.cu_seqlens.diff().tolist())
        order = sorted(range(len(pieces)), key=lambda row: pieces[row].numel())
        size = -(-len(order) // batches)
        self.batches: list[tuple[Tensor, Tensor, Tensor]] = []
        for begin in range(0, len(order), size):
            rows = order[begin : begin + size]
            tokens = torch.nn.utils.rnn.pad_sequence([pieces[row] for row in rows], batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([masks[row] for row in rows], batch_first=True)
            present = torch.nn.utils.rnn.pad_sequence([torch.ones_like(pieces[row]) for row in rows], batch_first=True)
            self.batches.append((tokens, present, mask))

    def policy_loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, present, mask = batch
        logits = self.policy(input_ids=tokens, attention_mask=present, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")[mask[:, 1:].flatten()].sum()

    def critic_loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, present, mask = batch
        hidden = self.critic.model(input_ids=tokens, attention_mask=present, use_cache=False).last_hidden_state[:, :-1]
        return self.head(hidden)[..., 0].float()[mask[:, 1:]].square().sum()

    @torch.no_grad()
    def forward(self) -> None:
        for batch in self.batches:
            self.policy_loss(batch)
            self.critic_loss(batch)

    def forward_backward(self) -> None:
        for loss in (self.policy_loss, self.critic_loss):
            for batch in self.batches:
                loss(batch).backward()
        for module in (self.policy, self.critic, self.head):
            module.zero_grad(set_to_none=True)


def adamw_seconds(parameters: int) -> float:
    """Measure one AdamW step for policy and critic on float32 parameters of the model's size."""
    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.ones(parameters)
    optimizer = torch.optim.AdamW([weight], foreach=True)
    optimizer.step()
    return 2 * statistics.median(seconds(optimizer.step) for _ in range(3))


def bare_generate(trainer: StepRunner, experience: Experience, config: Config) -> float:
    """Measure a plain vLLM call with the step's prompts and numbers of tokens."""
    from vllm import SamplingParams

    llm: Any = trainer.sampler.engine._llm  # type: ignore[attr-defined]
    prompts, parameters = [], []
    for row, tokens in enumerate(experience.batch["tokens"].split(experience.cu_seqlens.diff().tolist())):
        length = int(experience.batch.rows.response_length[row])
        prompts.append({"prompt_token_ids": tokens[: tokens.numel() - length].tolist()})
        parameters.append(
            SamplingParams(temperature=config.rollout.temperature, max_tokens=length, min_tokens=length, ignore_eos=True, detokenize=False)
        )
    llm.reset_prefix_cache()
    with torch.compiler.set_stance("force_eager"):
        return seconds(lambda: llm.generate(prompts, parameters, use_tqdm=False))


def measure(config: Config, trainer: ObservedStepRunner, steps: int) -> None:
    bare = BareModels(config.model.path)
    parameters = sum(parameter.numel() for chunk in trainer.models.policy.chunks for parameter in chunk.parameters())
    trainer.sync.make_ready(lambda: None)
    trainer.rl_step(1)  # warms up both sides
    bare.take(trainer.experience)
    bare.forward_backward()
    bare_generate(trainer, trainer.experience, config)
    rows: list[dict[str, float]] = []
    for number in range(2, steps + 2):
        gc.collect()
        begin = time.perf_counter()
        outcome = trainer.rl_step(number)
        step = time.perf_counter() - begin
        bare.take(trainer.experience)
        row = {"step": step, "generate": bare_generate(trainer, trainer.experience, config)}
        row |= {"forward": seconds(bare.forward), "forward_backward": seconds(bare.forward_backward), "adamw": adamw_seconds(parameters)}
        row["bare"] = sum(row[name] for name in ("generate", "forward", "forward_backward", "adamw"))
        phases = {
            name.removeprefix("time/"): value for name, value in outcome.row.items() if name.startswith("time/") and value is not None
        }
        row |= {f"own_{name}": phases.get(name, 0.0) for name in PHASES}
        row |= {f"own_{name}": value for name, value in phases.items() if name not in ("step", *PHASES)}
        row["framework"] = step - sum(row[f"own_{name}"] for name in PHASES)
        row["tokens"] = float(trainer.experience.batch["tokens"].numel())
        row["response_tokens"] = float(trainer.experience.mask.sum())
        rows.append(row)
        print(f"step {number - 1} of {steps}: {row}", file=sys.stderr, flush=True)
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(
        json.dumps(
            {
                "benchmark": "step",
                "model": config.model.path,
                "dtype": config.model.dtype,
                "threads": torch.get_num_threads(),
                "steps": steps,
                "ratio": round(statistics.median(row["step"] / row["bare"] for row in rows), 3),
                "ratio_target": 1.25,
                "framework_share": round(statistics.median(row["framework"] / row["step"] for row in rows), 4),
                "framework_share_target": 0.05,
                "seconds": {name: round(value, 3) for name, value in median.items()},
            }
        ),
        flush=True,
    )


def build(config: Config, stack: ExitStack) -> ObservedStepRunner:
    parallel = initialize_parallel(config.parallel)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    prompts = PromptDataset(config.data, "train", tokenizer, seed=config.seed)
    engine = build_engine(config, parallel, tokenizer)
    verifiers = start_verifiers(config, engine.is_replica_leader, stack, sorted({prompt.verifier for prompt in prompts.items}))
    models = build_models(config, parallel, lambda text: None)
    sampler = ResponseSampler(engine, verifiers, tokenizer, config.seed)
    sync = WeightSync(models.policy, engine, models.residency, verify=False)
    return ObservedStepRunner(config, parallel, models, sampler, sync, prompts.next_batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="settings of examples/configs/smollm2_135m_chain_sum.yaml, as in vapo-mcore train")
    options = parser.parse_args()
    become_single_process()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        overrides = [*OVERRIDES, f"model.path={options.model}", f"run.dir={folder}/run", *options.overrides]
        config = load_config("examples/configs/smollm2_135m_chain_sum.yaml", overrides)
        measure(config, build(config, stack), options.steps)


if __name__ == "__main__":
    main()
