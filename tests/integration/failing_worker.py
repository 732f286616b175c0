"""A run whose rank 1 alone fails in the middle of the second step, while rank 0 goes on into a collective."""

import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.training_setup import training_config
from vapo_mcore.errors import TrainingError, VapoError
from vapo_mcore.launch.local import report_error
from vapo_mcore.trainer import step
from vapo_mcore.trainer.main import run_training

original = step.update_critic
calls = 0


def fails_on_rank_1(*arguments: object) -> None:
    global calls
    calls += 1
    if calls == 2 and dist.get_rank() == 1:
        raise TrainingError("the second update went wrong here")
    original(*arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    config = training_config(Path(sys.argv[1]), "failing", "critic.value_pretraining.steps=0", "reward.workers=2")
    try:
        with mock.patch.object(step, "update_critic", fails_on_rank_1):
            run_training(config, clean=False)
    except VapoError as error:
        report_error(str(error))
        sys.exit(error.exit_code)
