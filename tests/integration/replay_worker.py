"""Runs that test_replay_step.py reads, in two processes: torchrun ... replay_worker.py FOLDER.

A run with dumped steps, replays of them, and critics pretrained on its dumps and on scored responses in two layouts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.process_groups import release_groups
from tests.training_setup import training_config
from vapo_mcore.commands.pretrain_critic import pretrain
from vapo_mcore.commands.pretrain_options import PretrainOptions
from vapo_mcore.commands.replay import replay
from vapo_mcore.commands.replay_checks import ReplayOptions
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train

FOLDER = Path(sys.argv[1])
SETTINGS = (
    "run.steps=3",
    "run.wandb={project: replay, mode: offline}",
    "run.tensorboard=true",
    "run.dump_steps=[1]",
    "run.dump_every_steps=3",
    "critic.value_pretraining={steps: 1, lr: 0.01}",
    "critic.head_dropout=0.2",
    "critic.head=mlp",
    "checkpoint={every_minutes: 0, every_steps: 1, keep_last: 9, reshardable_every: 1}",
    "eval.every_steps=1",
    "export.best={metric: eval/heldout/avg@2}",
    "algorithm.kl={place: loss, kind: k3, coef: 0.1}",
    "algorithm.advantage.truncation=bootstrap",
    "algorithm.self_imitation={top_k: 2, batch_size: 6, coef: 0.5, value_coef: 1.0}",
)

CRITIC = ("batch.mini_batch_size=16", "critic={head_init: zero, optimizer: {lr: 0.001}, head_bias: mean_return}")
SAVED = f"critic={{init: saved, path: {FOLDER}/dp2/critic_pretrained/hf, value_pretraining: {{steps: 0}}}}"
CASES: dict[str, tuple[tuple[str, ...], PretrainOptions]] = {
    "dp2": (CRITIC, PretrainOptions((f"{FOLDER}/scored.jsonl",), passes=20)),
    "tp2": ((*CRITIC, "parallel.tensor_model_parallel_size=2"), PretrainOptions((f"{FOLDER}/scored.jsonl",), passes=2)),
    "dumps": (CRITIC, PretrainOptions((f"{FOLDER}/run",), fraction=0.3, passes=1)),
    "critic_tp2": ((*CRITIC, "critic.parallel.tensor_model_parallel_size=2"), PretrainOptions((f"{FOLDER}/scored.jsonl",), passes=2)),
    "saved": ((SAVED,), PretrainOptions((f"{FOLDER}/scored.jsonl",), passes=1)),
}

if __name__ == "__main__":
    config = training_config(FOLDER, "run", *SETTINGS)
    parallel = initialize_parallel(config.parallel)
    train(config, parallel, clean=False)
    for name, step, checkpoint in (("first", 1, None), ("third", 3, None), ("older", 3, "step_000001")):
        replay(config, parallel, ReplayOptions(step, checkpoint=checkpoint, json_path=str(FOLDER / f"{name}.json")))
        dist.barrier()
    release_groups()
    config = training_config(
        FOLDER, "critic_layout", *SETTINGS, "run.steps=1", "run.dump_every_steps=0", "critic.parallel.pipeline_model_parallel_size=2"
    )
    parallel = initialize_parallel(config.parallel)
    train(config, parallel, clean=False)
    replay(config, parallel, ReplayOptions(1, json_path=str(FOLDER / "critic_layout.json")))
    dist.barrier()
    for name, (settings, options) in CASES.items():
        release_groups()
        config = training_config(FOLDER, name, *settings)
        parallel = initialize_parallel(config.critic_parallel)
        metrics = pretrain(config, parallel, options)
        if parallel.rank == 0:
            (FOLDER / f"{name}_passes.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()
