"""Whole runs with faults put into them, one after another in one launch of two processes: faults_worker.py FOLDER [vllm].

test_faults.py reads what they leave. Rank 0 prints one JSON line a case.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from tests.process_groups import release_groups
from tests.training_setup import training_config
from vapo_mcore.errors import RewardError, RunStopped, StepAbandoned
from vapo_mcore.experience.bad_batch import load_bad_batch
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.losses import PolicyLoss
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.rewards import VerifierPool
from vapo_mcore.rollout.transformers_engine import TransformersEngine
from vapo_mcore.trainer.main import train
from vapo_mcore.trainer.step import StepRunner
from vapo_mcore.weights.checksums import tensor_checksum

FOLDER = Path(sys.argv[1])
NO_PRETRAINING = "critic.value_pretraining.steps=0"
Batch = dict[str, Tensor]


def run(name: str, *overrides: str) -> None:
    config = training_config(FOLDER, name, "export.at_end=false", *overrides)
    train(config, initialize_parallel(config.parallel), clean=False)


@contextmanager
def trainer_watched() -> Iterator[list[StepRunner]]:
    """The trainers that are made in this block."""
    made: list[StepRunner] = []
    original = StepRunner.__init__

    def watched(self: StepRunner, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        made.append(self)

    with mock.patch.object(StepRunner, "__init__", watched):
        yield made


@contextmanager
def nan_losses(chosen: Callable[[int], bool]) -> Iterator[None]:
    """On rank 1 the loss of the chosen updates of the policy, counted from 1, is NaN."""
    original, calls = PolicyLoss.__call__, 0
    accumulate = MegatronModel.accumulate

    def counted(self: MegatronModel, microbatches: Any, loss: Any, *more: Any) -> Any:
        nonlocal calls
        calls += isinstance(loss, PolicyLoss)
        return accumulate(self, microbatches, loss, *more)

    def spoilt(self: PolicyLoss, outputs: Batch, batch: Batch) -> tuple[Tensor, Batch]:
        total, stats = original(self, outputs, batch)
        return (total * math.nan if dist.get_rank() == 1 and chosen(calls) else total), stats

    with mock.patch.object(PolicyLoss, "__call__", spoilt), mock.patch.object(MegatronModel, "accumulate", counted):
        yield


def checksums(model: MegatronModel) -> list[str]:
    return [tensor_checksum(parameter) for chunk in model.chunks for parameter in chunk.parameters()]


def one_bad_update_is_skipped() -> dict[str, Any]:
    with nan_losses(lambda number: number == 1):
        run("skipped", NO_PRETRAINING)
    return {}


def bad_updates_in_a_row_stop_the_run() -> dict[str, Any]:
    """Updates 3 and 4 (the second step's) are bad; the batch of the last one gives the update again that the run should have made."""
    with trainer_watched() as trainers, nan_losses(lambda number: number >= 3):
        try:
            run("stopped", NO_PRETRAINING, "faults.bad_updates_in_a_row=2", "run.steps=9")
        except RunStopped as stop:
            message, code = str(stop), stop.exit_code
    (trainer,) = trainers
    policy, parallel = trainer.models.policy, trainer.parallel
    info, microbatches = load_bad_batch(FOLDER / "stopped/faults/bad_batch_rl_step_0002_policy", parallel.data_parallel_rank, parallel)
    before = checksums(policy)
    again = policy.train_step(microbatches, PolicyLoss(trainer.config))
    return {
        "message": message,
        "code": code,
        "tokens": sum(int(batch.tensors["response_mask"].sum()) for batch in microbatches),
        "mine": sorted({row for batch in microbatches for row in batch.rows.tolist()}),
        "reason": info["reason"],
        "again": again.metrics,
        "made": again.skipped is None and checksums(policy) != before,
    }


@contextmanager
def failing(owner: type, method: str, error: Exception, chosen: Callable[[int], bool], *, after: bool = False) -> Iterator[None]:
    """On rank 1 the chosen calls of a method, counted from 1, raise ``error``, before or after they have done their work."""
    original, calls = getattr(owner, method), 0

    def spoilt(self: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        fails = dist.get_rank() == 1 and chosen(calls)
        result = original(self, *arguments, **more) if after or not fails else None
        if fails:
            raise error
        return result

    with mock.patch.object(owner, method, spoilt):
        yield


def abandoned(name: str, *overrides: str) -> dict[str, Any]:
    """What a run says that stops early."""
    try:
        run(name, *overrides)
    except (StepAbandoned, RunStopped) as error:
        return {"message": str(error), "kind": type(error).__name__}
    return {"message": None}


def graders_gone_for_good() -> dict[str, Any]:
    """The second grading of rank 1 (the first is the evaluation's) fails: no rank is left waiting."""
    with failing(VerifierPool, "grade", RewardError("no process stays alive"), lambda number: number == 2):
        return abandoned("graders", NO_PRETRAINING)


def undisturbed() -> dict[str, Any]:
    run("undisturbed", NO_PRETRAINING)
    return {}


def failing_engine(*calls: int) -> AbstractContextManager[None]:
    """Generation fails on rank 1 alone, after it has done its work. The first call is the evaluation's at the start."""
    return failing(TransformersEngine, "_generate", RuntimeError("the device is lost"), lambda number: number in calls, after=True)


def engine_fails_once() -> dict[str, Any]:
    with failing_engine(3):
        return abandoned("engine_once", NO_PRETRAINING)


def engine_fails_again() -> dict[str, Any]:
    """In the second step, twice: its generation is the third call, and the fourth after the rebuild."""
    with trainer_watched() as trainers, failing_engine(3, 4):
        facts = abandoned("engine_again", NO_PRETRAINING, "model.offload=true")
    engine: Any = trainers[0].sampler.engine
    held = sum(parameter.nbytes for parameter in engine._parameters.values())
    return facts | {"checkpoints": checkpoints("engine_again"), "engine": engine.state.name, "engine_bytes": held}


def engine_fails_in_an_evaluation() -> dict[str, Any]:
    with failing_engine(4):
        facts = abandoned("engine_evaluation", NO_PRETRAINING, "faults.engine_rebuilds=0")
    return facts | {"checkpoints": checkpoints("engine_evaluation")}


def checkpoints(name: str) -> list[str]:
    dist.barrier()
    return sorted(path.name for path in (FOLDER / name / "checkpoints").iterdir() if not path.name.startswith("."))


VLLM = (NO_PRETRAINING, "rollout.engine=vllm", "parallel.tensor_model_parallel_size=2", "eval.at_start=false", "eval.at_end=false")
VLLM_SIZES = ("rollout.vllm.kv_cache_gib=0.0625", "rollout.vllm.max_num_seqs=64", "rollout.verify_weights=true")


def engine_undisturbed() -> dict[str, Any]:
    run("engine_undisturbed", *VLLM, *VLLM_SIZES)
    return {}


def engine_fails_twice() -> dict[str, Any]:
    """vLLM fails on one rank of a replica in the second step, is rebuilt, and fails again in the third."""
    from vapo_mcore.rollout.vllm_engine import VllmEngine

    fault = RuntimeError("the device is lost")
    before = vllm_segments()
    with trainer_watched() as trainers, failing(VllmEngine, "_generate", fault, lambda number: number in (2, 4), after=True):
        facts = abandoned("engine_twice", *VLLM, *VLLM_SIZES, "run.steps=4", "model.offload=true")
    engine: Any = trainers[0].sampler.engine
    return facts | {"engine": engine.state.name, "llm": engine._llm is not None, "segments_left": sorted(vllm_segments() - before)}


def vllm_segments() -> set[str]:
    """vLLM's shared memory; others' files come and go there."""
    return {path.name for path in Path("/dev/shm").glob("*cpushm*")}


CASES: list[Callable[[], dict[str, Any]]] = [
    one_bad_update_is_skipped,
    bad_updates_in_a_row_stop_the_run,
    graders_gone_for_good,
    undisturbed,
    engine_fails_once,
    engine_fails_again,
    engine_fails_in_an_evaluation,
]

if __name__ == "__main__":
    chosen = [engine_undisturbed, engine_fails_twice] if sys.argv[2:] == ["vllm"] else CASES
    for case in chosen:
        facts: list[Any] = [None, None]
        dist_facts = case()
        dist.all_gather_object(facts, dist_facts)
        release_groups()
        if dist.get_rank() == 0:
            print(json.dumps({"case": case.__name__, "ranks": facts}), flush=True)
    dist.destroy_process_group()
