"""A run whose rank 1 alone goes wrong in the middle of the second step, while rank 0 goes on into a collective:

failing_worker.py FOLDER raise|die|hang|vllm [KEY=VALUE ...]

``vllm``: in the third step, in a forward pass of a replica that both ranks share.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.training_setup import training_config
from vapo_mcore.errors import TrainingError, VapoError
from vapo_mcore.launch.local import report_error
from vapo_mcore.trainer import step
from vapo_mcore.trainer.main import run_training

HOW = sys.argv[2]
original = step.update_critic
calls = 0


def goes_wrong_on_rank_1(*arguments: object) -> object:
    global calls
    calls += 1
    if calls == 2:
        group = dist.new_group() if HOW == "hang" else None
        if dist.get_rank() == 1:
            if HOW == "raise":
                raise TrainingError("the second update went wrong here")
            if HOW == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier(group)  # a collective that the other rank never joins
    return original(*arguments)  # type: ignore[arg-type]


@contextmanager
def inside_vllm() -> Iterator[None]:
    """Let the fourth forward pass of the third generation raise on rank 1."""
    from vapo_mcore.rollout.vllm_engine import VllmEngine

    generate = VllmEngine._generate

    def counted(self: Any, *arguments: Any) -> Any:
        global calls
        calls += 1
        if calls < 3 or dist.get_rank() == 0:
            return generate(self, *arguments)
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        passes = [GPUModelRunner.execute_model] * 3

        def forward(*inputs: Any, **named: Any) -> Any:
            if not passes:
                raise RuntimeError("the device is lost")
            return passes.pop()(*inputs, **named)

        with mock.patch.object(GPUModelRunner, "execute_model", forward):
            return generate(self, *arguments)

    with mock.patch.object(VllmEngine, "_generate", counted):
        yield


if __name__ == "__main__":
    config = training_config(Path(sys.argv[1]), f"failing_{HOW}", "critic.value_pretraining.steps=0", "reward.workers=2", *sys.argv[3:])
    try:
        with inside_vllm() if HOW == "vllm" else mock.patch.object(step, "update_critic", goes_wrong_on_rank_1):
            run_training(config, clean=False)
    except VapoError as error:
        report_error(str(error), error.exit_code)
        sys.exit(error.exit_code)
