"""Evaluations on two processes: whole, continued, from a Megatron checkpoint, of what a run exported; read by test_eval.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.process_groups import release_groups
from tests.training_setup import training_config
from vapo_mcore.commands import evaluate as evaluate_module
from vapo_mcore.commands.evaluate import evaluate
from vapo_mcore.evaluation.store import PROGRESS, RESPONSES
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train
from vapo_mcore.weights.convert import hf_to_megatron

FOLDER = Path(sys.argv[1])
SETTINGS = ("eval.samples_per_prompt=3", "eval.responses_per_chunk=4", "data.eval.0.fields.subsets=[level]")


def run(name: str, checkpoint: Path, *overrides: str, clean: bool = False) -> None:
    config = training_config(FOLDER, "unused", *SETTINGS, *overrides)
    evaluate(config, initialize_parallel(config.parallel), str(checkpoint), str(FOLDER / name), clean=clean)


def whole() -> None:
    run("whole", FOLDER / "model")


def continued() -> None:
    """As a run leaves it that was killed inside its second chunk: the first is complete, of the second some bytes are there."""
    if dist.get_rank() == 0:
        lines = (FOLDER / "whole" / PROGRESS).read_bytes().splitlines(keepends=True)
        (FOLDER / "continued").mkdir()
        (FOLDER / "continued" / PROGRESS).write_bytes(b"".join(lines[:2]) + lines[2][:5])
        size = (FOLDER / "whole" / RESPONSES).stat().st_size
        (FOLDER / "continued" / RESPONSES).write_bytes((FOLDER / "whole" / RESPONSES).read_bytes()[: size * 2 // 3])
    dist.barrier()
    run("continued", FOLDER / "model")


def complete_needs_no_engine() -> None:
    with mock.patch.object(evaluate_module, "build_engine", side_effect=AssertionError("nothing is left to generate")):
        run("whole", FOLDER / "model")


def megatron() -> None:
    if dist.get_rank() == 0:
        hf_to_megatron(FOLDER / "model", FOLDER / "megatron_checkpoint")
        shutil.rmtree(FOLDER / "megatron_checkpoint" / "hf")  # config and tokenizer of model.path
    dist.barrier()
    run("megatron", FOLDER / "megatron_checkpoint")


def trained() -> None:
    """The evaluation at the end of a run, and that of what the run exported."""
    settings = ("critic.value_pretraining.steps=0", "run.steps=1", "eval.at_start=false", "export.at_end=true")
    config = training_config(FOLDER, "trained", *SETTINGS, *settings)
    train(config, initialize_parallel(config.parallel), clean=False)
    run("exported", FOLDER / "trained" / "export" / "hf")


CASES = [whole, continued, complete_needs_no_engine, megatron, trained]

if __name__ == "__main__":
    for case in CASES:
        case()
        release_groups()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok", flush=True)
    dist.destroy_process_group()
