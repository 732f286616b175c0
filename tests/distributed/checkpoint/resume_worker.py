"""torchrun worker of test_resume.py: whole runs in two processes, stopped and continued, one after another in one launch. It asserts what
only a rank can see; the test compares what the runs leave.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.process_groups import release_groups
from tests.training_setup import training_config
from vapo_mcore import checkpoint_files as files
from vapo_mcore.checkpoint import strategies
from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.errors import EXIT_REQUEUE, CheckpointError, ConfigError, DataError, RunStopped, StepAbandoned
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train
from vapo_mcore.trainer.step import StepOutcome, StepRunner

FOLDER = Path(sys.argv[1])
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
CRITIC_TP2, CRITIC_PP2 = f"critic.{TP2}", f"critic.{PP2}"
# eps as in layouts/worker.py: with AdamW's 1e-8 the update of an element whose gradient is nearly zero is rounding, scaled up.
CRITIC = (
    "critic.probe={prompts: 5, responses_per_prompt: 2, every_steps: 1}",
    "model.offload=true",
    "policy.optimizer.eps=1e-5",
    "critic.optimizer.eps=1e-5",
)
COMMON = ("eval.at_end=false", "eval.at_start=false", "policy.optimizer.warmup_rollouts=3", "export.at_end=true")
SHARDS = "checkpoint={every_steps: 1, reshardable_every: 0, keep_last: 9}"
GATHERED = "checkpoint={every_steps: 2, reshardable_every: 1}"


def run(name: str, *overrides: str, resume: ResumeOptions | None = None) -> None:
    config = training_config(FOLDER, name, *COMMON, *overrides)
    train(config, initialize_parallel(config.parallel), clean=False, resume=resume)
    release_groups()


def expected(kind: type[Exception], words: tuple[str, ...], name: str, *overrides: str, resume: ResumeOptions | None = None) -> str:
    """The message of a run that must be refused, on every rank, with these words."""
    try:
        run(name, *overrides, resume=resume)
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"{name} {overrides} was not refused")
    assert all(word in message for word in words), message
    release_groups()
    return message


@contextmanager
def during_step(number: int, act: Callable[[StepRunner], None]) -> Iterator[None]:
    """Do something at the beginning of an RL step."""
    original = StepRunner.rl_step

    def watched(self: StepRunner, step: int) -> StepOutcome:
        if step == number:
            act(self)
        return original(self, step)

    with mock.patch.object(StepRunner, "rl_step", watched):
        yield


def other_layouts() -> None:
    """Six steps at TP 2; and two at TP 2, two at PP 2, two at DP 2."""
    run("tp2", TP2, GATHERED, "run.steps=6")
    run("reshaped", TP2, GATHERED, "run.steps=2")
    run("reshaped", PP2, GATHERED, "run.steps=4", resume=ResumeOptions())
    run("reshaped", GATHERED, "run.steps=6", resume=ResumeOptions())


def same_layout() -> None:
    """Stopped by one rank in the middle of a step, in value pretraining's last step too; bf16, so that main parameters matter."""
    settings = (SHARDS, "model.dtype=bfloat16", "rollout.dynamic_sampling={enabled: true, max_rounds: 2}")
    run("whole", *settings, "run.steps=4")

    def stop(trainer: StepRunner) -> None:
        if dist.get_rank() == 1:
            trainer.stop_requests.request("SIGUSR1", exit_code=EXIT_REQUEUE)

    with during_step(3, stop):
        try:
            run("stopped", *settings, "run.steps=4")
            raise AssertionError("the run was not stopped")
        except RunStopped as stopped:
            assert (stopped.exit_code, "after step 3 (rl)" in str(stopped)) == (EXIT_REQUEUE, True), str(stopped)
    run("stopped", *settings, "run.steps=4", resume=ResumeOptions("step_000002"))
    run("pretraining", *settings, "run.steps=4", "checkpoint.keep_last=99")
    run("pretraining", *settings, "run.steps=4", resume=ResumeOptions("value_pretraining_000002"))
    run("pretraining", *settings, "run.steps=4", resume=ResumeOptions("value_pretraining_000001"))


def abandoned() -> None:
    """A step that cannot be done leaves a checkpoint of the step before, and the resumed run does it again."""
    settings = ("checkpoint.every_minutes=0", "run.steps=3")
    run("unbroken", *settings)

    def fail(trainer: StepRunner) -> None:
        trainer.next_prompts(3)  # what the step has drawn before it failed must not count
        trainer.rollouts += 1
        raise StepAbandoned("the rollout engine is gone")

    with during_step(2, fail):
        expected(StepAbandoned, ("engine is gone",), "abandoned", *settings)
    assert [path.name for path in files.list_checkpoints(FOLDER / "abandoned")] == ["step_000001"]
    run("abandoned", *settings, resume=ResumeOptions())


def full_disk() -> None:
    """Too little space is found before; a disk that fills while one rank writes fails the save on all ranks (rank 0's own file in value
    pretraining, rank 1's tensors at step 4); training goes on and the save is repeated; what was there stays."""
    settings = ("checkpoint={every_steps: 2, every_minutes: 0, at_end: true}", "run.steps=5")

    def no_space(_path: Path, _bytes: int) -> None:
        raise CheckpointError("no space for a checkpoint")

    original = strategies.HashingFile._append
    attempts: list[int] = []

    def fails_once(self: Any, data: Any) -> None:
        if dist.get_rank() == 1 and "incomplete-step_000004" in str(self.path) and not attempts:
            attempts.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    opened = io.open

    def no_room_for_common(file: Any, mode: str = "r", *positional: Any, **named: Any) -> Any:
        if str(file).endswith("incomplete-value_pretraining_000002/critic/optimizer/common.pt"):
            return opened("/dev/full", mode.replace("x", "w"), *positional, **named)
        return opened(file, mode, *positional, **named)

    with mock.patch.object(strategies.HashingFile, "_append", fails_once), mock.patch.object(io, "open", no_room_for_common):
        run("full", *settings)
    assert len(attempts) == int(dist.get_rank() == 1)
    assert [path.name for path in files.list_checkpoints(FOLDER / "full")] == ["step_000002", "step_000005"]
    with mock.patch.object(files, "require_space", no_space):
        run("no_space", *settings)
    assert files.list_checkpoints(FOLDER / "no_space") == []


def damage() -> None:
    """The newest is damaged: the one before is used; all are: refused; none is: a fresh start."""
    dist.barrier()
    if dist.get_rank() == 0:
        victim = next((FOLDER / "full/checkpoints/step_000005/policy/optimizer").glob("*.distcp"))
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))
        (FOLDER / "full/finished.json").unlink()
    dist.barrier()
    run("full", "checkpoint={every_steps: 2, every_minutes: 0, at_end: true}", "run.steps=5", resume=ResumeOptions())
    names = sorted(path.name for path in (FOLDER / "full/checkpoints").iterdir())
    assert names == ["step_000004", "step_000005", "step_000005.set_aside"], names
    dist.barrier()
    if dist.get_rank() == 0:
        for path in files.list_checkpoints(FOLDER / "full"):
            (path / "manifest.json").write_text("{")
    dist.barrier()
    expected(CheckpointError, ("step_000004, step_000005", "--clean"), "full", "run.steps=6", resume=ResumeOptions())
    run("fresh", "run.steps=1", "critic.value_pretraining.steps=0", resume=ResumeOptions())


def refused() -> None:
    """Changed settings, another layout than the shards allow, changed data."""
    base = (SHARDS, "model.dtype=bfloat16", "rollout.dynamic_sampling={enabled: true, max_rounds: 2}", "run.steps=5")
    latest = ResumeOptions()
    faults = ("policy.optimizer.lr: 0.001 -> 0.002", "seed: 5 -> 6", "--allow-config-change")
    expected(ConfigError, faults, "whole", *base, "policy.optimizer.lr=0.002", "seed=6", resume=latest)
    shards = ("tensor_model_parallel_size 1 -> 2", "any other checkpoint", "reshardable_every=1")
    expected(CheckpointError, shards, "whole", *base, TP2, resume=latest)
    data = f"data.train.0.path={FOLDER / 'heldout.jsonl'}"
    words = ("the prompts of source", "--restart-data")
    name = "data.train.0.name=train"
    expected(DataError, words, "whole", *base, data, name, resume=ResumeOptions(allow_config_change=True))
    run("whole", *base, data, name, resume=ResumeOptions(allow_config_change=True, restart_data=True))


def from_a_checkpoint() -> None:
    """A new run takes the policy and the critic of another run's checkpoint, saved at another layout."""
    checkpoint = files.list_checkpoints(FOLDER / "tp2")[-1]
    critic = f"critic={{init: saved, path: {checkpoint}, value_pretraining: {{steps: 0}}, head_init: null}}"
    run("started", f"policy.path={checkpoint}", critic, "run.steps=1", "eval.at_start=true")


def critic_layouts() -> None:
    """A critic at TP 2 beside a policy at DP 2: resumed bit for bit, then with other layouts of both; what is refused."""
    shards = (*CRITIC, SHARDS, "model.dtype=bfloat16")
    run("critic_whole", *shards, CRITIC_TP2, "run.steps=3")
    run("critic_resumed", *shards, CRITIC_TP2, "run.steps=2")
    manifest = files.Manifest.read(files.list_checkpoints(FOLDER / "critic_resumed")[-1])
    assert [manifest.layout_of(role)["tensor_model_parallel_size"] for role in ("policy", "critic")] == [1, 2]
    words = ("tensor_model_parallel_size 2 -> 1 of the critic, pipeline_model_parallel_size 1 -> 2 of the critic", "at the old layout")
    expected(CheckpointError, words, "critic_resumed", *shards, CRITIC_PP2, "run.steps=3", resume=ResumeOptions())
    words = ("(tensor_model_parallel_size 2 -> 1 of the critic, ",)
    expected(CheckpointError, words, "critic_resumed", *shards, "run.steps=3", resume=ResumeOptions())
    run("critic_resumed", *shards, CRITIC_TP2, "run.steps=3", resume=ResumeOptions())
    run("critic_reshaped", *CRITIC, GATHERED, CRITIC_TP2, "run.steps=2")
    run("critic_reshaped", *CRITIC, GATHERED, CRITIC_PP2, TP2, "run.steps=3", resume=ResumeOptions())
    run("critic_reshaped", *CRITIC, GATHERED, "run.steps=4", resume=ResumeOptions())
    run("critic_shared", *CRITIC, GATHERED, "run.steps=4")


CASES: list[Callable[[], None]] = [other_layouts, same_layout, abandoned, full_disk, damage, refused, from_a_checkpoint, critic_layouts]

if __name__ == "__main__":
    for case in [case for case in CASES if not sys.argv[2:] or case.__name__ in sys.argv[2:]]:
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok", flush=True)
    dist.destroy_process_group()
