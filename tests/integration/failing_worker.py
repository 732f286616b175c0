"""A run whose rank 1 alone goes wrong in the middle of the second step, while rank 0 goes on into a collective:

failing_worker.py FOLDER raise|die|hang [KEY=VALUE ...]
"""

import os
import signal
import sys
from pathlib import Path
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


if __name__ == "__main__":
    config = training_config(Path(sys.argv[1]), f"failing_{HOW}", "critic.value_pretraining.steps=0", "reward.workers=2", *sys.argv[3:])
    try:
        with mock.patch.object(step, "update_critic", goes_wrong_on_rank_1):
            run_training(config, clean=False)
    except VapoError as error:
        report_error(str(error))
        sys.exit(error.exit_code)
