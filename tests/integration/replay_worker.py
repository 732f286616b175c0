"""A run with dumped steps in two processes, and replays of them, which test_replay_step.py reads: torchrun ... replay_worker.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from tests.training_setup import training_config
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

if __name__ == "__main__":
    config = training_config(FOLDER, "run", *SETTINGS)
    parallel = initialize_parallel(config.parallel)
    train(config, parallel, clean=False)
    for name, step, checkpoint in (("first", 1, None), ("third", 3, None), ("older", 3, "step_000001")):
        replay(config, parallel, ReplayOptions(step, checkpoint=checkpoint, json_path=str(FOLDER / f"{name}.json")))
        dist.barrier()
    dist.destroy_process_group()
