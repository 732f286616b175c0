"""Real signals to ``vapo-mcore train``: a run with vLLM that is told to stop continues bit for bit; the launcher passes signals on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import ROOT
from tests.training_setup import read_metrics, write_setup

pytestmark = pytest.mark.slow

CLI = [sys.executable, "-m", "vapo_mcore.cli", "train"]
SETTINGS = [
    "run.steps=4",
    "batch.prompts_per_step=15",  # the first epoch of 40 prompts ends in the third step
    "policy.optimizer.warmup_rollouts=6",
    "critic.value_pretraining.steps=0",
    "eval.every_steps=2",
    "reward.timeout_seconds=600",
    "checkpoint.every_minutes=0",
]


class Started:
    """A training run in a session of its own, with its output in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.run = folder / name
        self.log = folder / f"{name}{len(list(folder.glob(f'{name}*.log')))}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*CLI, str(folder / "base.yaml"), *SETTINGS, f"run.dir={self.run}", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, text: str, timeout: float = 200) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.02)

    def ended(self, timeout: float = 200) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("stop"), model="qwen2_tied")


def rows(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "memory/")) and key != "tokens/per_second"}
        for row in read_metrics(run)
    ]


def test_a_vllm_run_stopped_by_slurm_s_warning_continues_bit_for_bit(folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    vllm = ["parallel.world_size=1", "rollout.engine=vllm", "rollout.vllm.kv_cache_gib=0.1"]
    stopped = Started(folder, "stopped", *vllm)
    stopped.wait_for("step 2/4 |")
    stopped.process.send_signal(signal.SIGUSR1)
    assert stopped.ended() == 75, stopped.log.read_text()[-4000:]
    text = stopped.log.read_text()
    assert "SIGUSR1: stopping after this step with a checkpoint" in text
    assert "continue with --resume" in text
    assert "Traceback" not in text
    assert not (stopped.run / "export").exists()
    resumed, whole = Started(folder, "stopped", *vllm, "--resume"), Started(folder, "whole", *vllm)
    assert resumed.ended() == 0, resumed.log.read_text()[-4000:]
    assert whole.ended() == 0, whole.log.read_text()[-4000:]
    assert "resuming from" in resumed.log.read_text()
    assert rows(whole.run) == rows(stopped.run)
    assert [row["step"] for row in rows(whole.run)] == [0, 1, 2, 3, 4]
    weights = [{path.name: path.read_bytes() for path in (run / "export/hf").glob("*.safetensors")} for run in (whole.run, stopped.run)]
    assert weights[0] == weights[1] != {}


def test_the_launcher_passes_signals_on_and_a_second_one_ends_the_run_at_once(folder: Path) -> None:
    two = ["parallel.world_size=2", "run.steps=400", "eval.every_steps=0", "eval.at_start=false"]
    run = Started(folder, "launched", *two)
    run.wait_for("step 1/400 |")
    live = Started(folder, "launched", *two, "--resume")  # while it runs, nobody else may use its directory
    assert live.ended() == 2
    assert "is in use by a live run" in live.log.read_text()
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 75, run.log.read_text()[-4000:]
    assert len(list((run.run / "checkpoints").glob("step_*"))) == 1
    again = Started(folder, "launched", *two, "--resume")
    again.wait_for("resuming from")
    again.wait_for(f"step {len(rows(run.run)) + 1}/400 |")
    start = time.monotonic()
    again.process.send_signal(signal.SIGTERM)
    again.process.send_signal(signal.SIGUSR1)
    assert again.ended() in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
    assert time.monotonic() - start < 20
    assert not [path for path in (run.run / "checkpoints").iterdir() if path.name == "step_000400"]
