"""A run in one process that is stopped in a step and continued: what it leaves is what the uninterrupted run leaves, bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.process_groups import release_groups, share_gloo_device
from tests.training_setup import exported_weights, read_metrics, repeatable_rows, training_config, write_setup
from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.checkpoint_files import Manifest, list_checkpoints
from vapo_mcore.errors import EXIT_REQUEUE, CheckpointError, ConfigError, RecordError, RunStopped, StepAbandoned, StepBroken
from vapo_mcore.experience.evaluator import Evaluation, Evaluator
from vapo_mcore.experience.sampling import ResponseSampler
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train
from vapo_mcore.trainer.step import StepOutcome, StepRunner
from vapo_mcore.trainer.value_pretraining import PretrainingEnd

SETTINGS = (
    "parallel.world_size=1",
    "run.steps=2",
    "rollout.max_response_length=24",
    "critic.value_pretraining={steps: 1, lr: 0.01}",
    "policy.optimizer.warmup_rollouts=4",
    "checkpoint={every_minutes: 0, every_steps: 1, keep_last: 9}",
    "algorithm.kl={place: loss, kind: k3, coef: 0.1}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    share_gloo_device()
    yield write_setup(tmp_path_factory.mktemp("resume"), model="qwen2_tied")
    if dist.is_initialized():
        dist.destroy_process_group()


def run(folder: Path, name: str, resume: ResumeOptions | None = None, *overrides: str) -> None:
    config = training_config(folder, name, *SETTINGS, *overrides)
    parallel = initialize_parallel(config.parallel)
    try:
        train(config, parallel, clean=False, resume=resume)
    finally:
        release_groups()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The run that nobody stops."""
    run(folder, "whole")
    return folder / "whole"


def test_a_stopped_run_continues_bit_for_bit(folder: Path, whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    original = StepRunner.rl_step

    def stopping(self: StepRunner, number: int) -> StepOutcome:
        self.stop_requests.request("SIGUSR1", exit_code=EXIT_REQUEUE)
        return original(self, number)

    with mock.patch.object(StepRunner, "rl_step", stopping), pytest.raises(RunStopped, match=r"after step 1 \(rl\)") as stopped:
        run(folder, "stopped")
    assert stopped.value.exit_code == 75
    names = [path.name for path in list_checkpoints(folder / "stopped")]
    assert names == ["value_pretraining_000001", "step_000001"]
    assert not (folder / "stopped" / ".lock").read_text()
    run(folder, "stopped", ResumeOptions("value_pretraining_000001"))
    assert "step_000001 is newer than the one the run resumes from" in capfd.readouterr().out
    assert repeatable_rows(folder / "stopped") == repeatable_rows(whole)
    assert [(row["stage"], row["step"]) for row in repeatable_rows(whole)] == [("rl", 0), ("value_pretraining", 1), ("rl", 1), ("rl", 2)]
    assert exported_weights(folder / "stopped") == exported_weights(whole) != {}


def test_a_step_that_cannot_be_done_leaves_the_one_before(folder: Path, whole: Path) -> None:
    """What it has drawn before it failed does not count: the resumed run does the step again. The exit code asks for a new process after a
    step of this start, and ends the run where a resumed one fails at once."""
    original = StepRunner.rl_step

    def failing(self: StepRunner, number: int) -> StepOutcome:
        if number == 2:
            self.next_prompts(3)
            self.rollouts += 1
            raise StepAbandoned("the rollout engine is gone", EXIT_REQUEUE)
        return original(self, number)

    rarely = "checkpoint.every_steps=0"
    with mock.patch.object(StepRunner, "rl_step", failing):
        for resume, exit_code in ((None, EXIT_REQUEUE), (ResumeOptions(), 2)):
            with pytest.raises(StepAbandoned) as caught:
                run(folder, "abandoned", resume, rarely)
            assert caught.value.exit_code == exit_code
    assert json.loads((folder / "abandoned" / "engine.json").read_text())["engine"] == "transformers"
    assert [path.name for path in list_checkpoints(folder / "abandoned")] == ["step_000001"]
    with pytest.raises(ConfigError, match=r"(?s)seed: 5 -> 6.*--allow-config-change"):
        run(folder, "abandoned", ResumeOptions(), rarely, "seed=6")
    run(folder, "abandoned", ResumeOptions(), rarely)
    assert repeatable_rows(folder / "abandoned") == repeatable_rows(whole)
    assert exported_weights(folder / "abandoned") == exported_weights(whole)


def test_a_broken_step_keeps_the_checkpoint_that_was_being_written(folder: Path) -> None:
    original = StepRunner.rl_step

    def broken(self: StepRunner, number: int) -> StepOutcome:
        if number == 2:
            raise StepBroken("NaN or infinity")
        return original(self, number)

    late = mock.patch.object(Checkpointer, "poll")  # as if the disk were slow
    with late, mock.patch.object(StepRunner, "rl_step", broken), pytest.raises(StepBroken):
        run(folder, "broken", None)
    assert list_checkpoints(folder / "broken")[-1].name == "step_000001"


def contents(run: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_refused_resume_changes_nothing(folder: Path, whole: Path) -> None:
    """Rows that the checkpoint has seen are gone: newer checkpoints keep their names, and nothing else is touched either."""
    cut = folder / "cut"
    shutil.copytree(whole, cut)
    (cut / "finished.json").unlink()
    (cut / "metrics.jsonl").write_text((cut / "metrics.jsonl").read_text().splitlines(keepends=True)[0])
    before = contents(cut)
    with pytest.raises(CheckpointError, match="rows are missing"):
        run(folder, "cut", ResumeOptions("step_000001"))
    assert contents(cut) == before


def test_an_evaluation_that_was_lost_is_made_up(folder: Path, whole: Path) -> None:
    """Twice it cannot be done, the third start does it: the run is the one that nobody stopped, its row of that step included."""

    def failing(_: Evaluator, sampler: ResponseSampler) -> Evaluation:
        raise StepAbandoned("the rollout engine is gone")

    after_step_one = "eval={every_steps: 1, samples_per_prompt: 2, top_p: 1.0, at_start: false}"
    run(folder, "evaluated", None, after_step_one)
    name, resume = "unevaluated", None
    for _ in range(2):
        with mock.patch.object(Evaluator, "run", failing), pytest.raises(RunStopped, match="evaluation after step 1 failed"):
            run(folder, name, resume, after_step_one)
        assert [(row["stage"], row["step"]) for row in repeatable_rows(folder / name)] == [("value_pretraining", 1), ("rl", 1)]
        assert not any(key.startswith("eval/") for row in repeatable_rows(folder / name) for key in row)
        resume = ResumeOptions()
    run(folder, name, resume, after_step_one)
    assert repeatable_rows(folder / name) == repeatable_rows(folder / "evaluated")
    assert any(key.startswith("eval/") for key in repeatable_rows(folder / name)[1])
    kept = [{path.name: path.read_bytes() for path in (folder / run / "samples").iterdir()} for run in (name, "evaluated")]
    assert kept[0] == kept[1]
    assert {path.name for path in (folder / name / "evaluations").iterdir()} >= {"step_0001.json", "step_0002.json"}


@pytest.mark.parametrize("steps", [1, 5])
def test_a_job_of_value_pretraining_alone_is_saved_at_its_end(folder: Path, whole: Path, steps: int) -> None:
    """After the last step, or where thresholds hold before it; a run with RL steps goes on from there."""
    settings, name = (
        ("checkpoint.every_steps=0", "checkpoint.at_end=true", f"critic.value_pretraining.steps={steps}"),
        f"pretrained_{steps}",
    )
    original = PretrainingEnd.after

    def good_enough(self: PretrainingEnd, row: dict[str, Any]) -> bool:
        original(self, row)
        self.over = True
        return True

    with mock.patch.object(PretrainingEnd, "after", good_enough):
        run(folder, name, None, *settings, "run.steps=0")
    (checkpoint,) = list_checkpoints(folder / name)
    manifest = Manifest.read(checkpoint)
    assert (manifest.name, manifest.optimizer_format) == ("value_pretraining_000001", "fully_reshardable")
    run(folder, name, ResumeOptions(), *settings)
    assert repeatable_rows(folder / name) == repeatable_rows(whole)
    assert exported_weights(folder / name) == exported_weights(whole)


def test_data_that_is_exhausted_stops_with_a_checkpoint(folder: Path) -> None:
    rarely = "checkpoint.every_steps=0"
    stop, go_on = (f"rollout.dynamic_sampling={{enabled: true, max_rounds: 1, on_exhausted: {way}}}" for way in ("stop", "train"))
    with pytest.raises(StepAbandoned, match="on_exhausted = 'stop'; use easier or harder data"):
        run(folder, "exhausted", None, rarely, stop)
    (checkpoint,) = list_checkpoints(folder / "exhausted")
    steps = Manifest.read(checkpoint).step
    assert [row["step"] for row in repeatable_rows(folder / "exhausted") if row["stage"] == "rl"] == list(range(steps + 1))
    run(folder, "exhausted", ResumeOptions(allow_config_change=True), rarely, go_on)
    run(folder, "trained", None, rarely, go_on)
    assert repeatable_rows(folder / "exhausted") == repeatable_rows(folder / "trained")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["checkpoints_on_another_disk", "one_disk"])
def test_a_full_disk_stops_the_run_and_a_resume_goes_on(
    elsewhere: bool, folder: Path, whole: Path, small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Metrics and samples of step 1 cannot be written; its checkpoint can where ``checkpoints`` is on a disk with room."""
    original, filler = StepRunner.rl_step, small_disk / "filler"

    def filling(self: StepRunner, number: int) -> StepOutcome:
        outcome = original(self, number)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        return outcome

    run_dir, settings = f"run.dir={small_disk}/run", "checkpoint={every_minutes: 0, every_steps: 0}"
    pretrain = StepRunner.value_pretraining_step

    def begins(self: StepRunner, number: int) -> StepOutcome:
        if elsewhere:
            (tmp_path / "large").mkdir()
            (small_disk / "run" / "checkpoints").symlink_to(tmp_path / "large")
        return pretrain(self, number)

    patches = (mock.patch.object(StepRunner, "rl_step", filling), mock.patch.object(StepRunner, "value_pretraining_step", begins))
    message = r"metrics\.jsonl cannot be written: No space left on device; stopped after step 1 \(rl\)"
    with patches[0], patches[1], pytest.raises(RunStopped, match=message) as stopped:
        run(folder, "full", None, settings, run_dir)
    assert stopped.value.exit_code == 2
    assert [row["step"] for row in read_metrics(small_disk / "run")] == [0, 1]  # the evaluation at the start and value pretraining
    assert [path.name for path in list_checkpoints(small_disk / "run")] == (["step_000001"] if elsewhere else [])
    assert ("this step has no checkpoint" in capfd.readouterr().out) != elsewhere
    with pytest.raises((RunStopped, RecordError, ConfigError), match="No space left on device"):  # the disk still is full
        run(folder, "full", ResumeOptions(), settings, run_dir)
    filler.unlink()
    run(folder, "full", ResumeOptions(), settings, run_dir)
    assert repeatable_rows(small_disk / "run") == repeatable_rows(whole)
    assert exported_weights(small_disk / "run") == exported_weights(whole)
