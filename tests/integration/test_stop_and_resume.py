"""Real signals to ``vapo-mcore train``: a run with vLLM that is told to stop continues bit for bit; the launcher passes signals on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forks import run_command
from tests.torchrun import ROOT
from tests.training_setup import exported_weights, repeatable_rows, write_setup
from vapo_mcore.checkpoint_files import list_checkpoints

pytestmark = pytest.mark.slow

CLI = [sys.executable, "-m", "vapo_mcore.cli", "train"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
]
TORCHRUN += ["--local-addr", "127.0.0.1", "--max-restarts", "2", "-m", *CLI[2:]]
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

    def __init__(self, folder: Path, name: str, *arguments: str, command: Sequence[str] = CLI) -> None:
        self.run = folder / name
        self.log = folder / f"{name}{len(list(folder.glob(f'{name}*.log')))}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, str(folder / "base.yaml"), *SETTINGS, f"run.dir={self.run}", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, text: str, timeout: float = 200, *, count: int = 1) -> None:
        deadline = time.monotonic() + timeout
        while self.log.read_text().count(text) < count:
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
    assert repeatable_rows(whole.run) == repeatable_rows(stopped.run)
    assert [row["step"] for row in repeatable_rows(whole.run)] == [0, 1, 2, 3, 4]
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
    again.wait_for(f"step {len(repeatable_rows(run.run)) + 1}/400 |")
    start = time.monotonic()
    again.process.send_signal(signal.SIGTERM)
    again.process.send_signal(signal.SIGUSR1)
    assert again.ended() in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
    assert time.monotonic() - start < 20
    assert not [path for path in (run.run / "checkpoints").iterdir() if path.name == "step_000400"]


def test_torchrun_starts_a_run_again_until_it_is_done(folder: Path) -> None:
    """A rank is killed in the middle of a step, twice: torchrun starts all ranks again, and they continue from the last checkpoint."""
    two = [
        "parallel.world_size=2",
        "checkpoint.every_steps=1",
        "checkpoint.asynchronous=false",
        "critic.value_pretraining.steps=1",
        "run.steps=7",
    ]
    whole = Started(folder, "unbroken", *two)
    assert whole.ended() == 0, whole.log.read_text()[-4000:]
    run = Started(folder, "restarted", *two, "--resume", command=TORCHRUN)
    for number, (rank, step) in enumerate(((1, "rl 2"), (0, "rl 4")), start=1):
        victim = process_in(run, rank, step)
        start = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        run.wait_for("resuming from", count=number)
        line = [line for line in run.log.read_text().splitlines() if line.startswith("resuming from")][-1]
        print(f"rank {rank} killed in {step}: after {time.monotonic() - start:.0f} s {line}")
    assert run.ended() == 0, run.log.read_text()[-4000:]
    assert repeatable_rows(run.run) == repeatable_rows(whole.run)
    assert [(row["stage"], row["step"]) for row in repeatable_rows(run.run)] == [
        ("rl", 0),
        ("value_pretraining", 1),
        *(("rl", n) for n in range(1, 8)),
    ]
    weights = [{path.name: path.read_bytes() for path in (one.run / "export/hf").glob("*.safetensors")} for one in (whole, run)]
    assert weights[0] == weights[1] != {}


def process_in(run: Started, rank: int, step: str, timeout: float = 200) -> int:
    """The process id of a rank as soon as its heartbeat says that it is in that step."""
    deadline = time.monotonic() + timeout
    path = run.run / "heartbeats" / f"rank_{rank:04d}.json"
    while True:
        assert run.process.poll() is None and time.monotonic() < deadline, run.log.read_text()[-4000:]
        try:
            beat = json.loads(path.read_text())
            if beat["step"] == step and beat["phase"] != "checkpoint":
                return int(beat["pid"])
        except (OSError, ValueError):
            pass  # not there yet
        time.sleep(0.02)


def test_a_mixture_killed_in_a_step_goes_on_bit_for_bit_and_converts(tmp_path: Path) -> None:
    """Policy and critic at EP 2 with the engine's choices; then checkpoint -> Hugging Face -> Megatron, each verified."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = write_setup(tmp_path, model="qwen3_moe")
    settings = ["parallel.expert_model_parallel_size=2", "model.router={replay: engine, balance_coef: 0.01, z_coef: 0.001}"]
    settings += ["rollout.engine=vllm", "rollout.tensor_parallel_size=1", "rollout.vllm.kv_cache_gib=0.1"]
    settings += ["checkpoint={every_minutes: 0, every_steps: 1, at_end: true}"]
    killed = Started(folder, "killed", *settings)
    os.kill(process_in(killed, 1, "rl 3"), signal.SIGKILL)
    assert killed.ended() != 0
    assert len(repeatable_rows(killed.run)) < 5
    assert not (killed.run / "export").exists()
    resumed = Started(folder, "killed", *settings, "--resume")
    assert resumed.ended() == 0, resumed.log.read_text()[-4000:]
    assert "resuming from" in resumed.log.read_text()
    whole = Started(folder, "whole", *settings)
    assert whole.ended() == 0, whole.log.read_text()[-4000:]
    rows = repeatable_rows(whole.run)
    assert rows == repeatable_rows(killed.run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for role in ("policy", "critic"):
        assert all(row[f"{role}/experts_replayed_frac"] > 0 for row in rows[2:])  # routers moved, choices did not
    assert exported_weights(whole.run) == exported_weights(killed.run) != {}
    check_conversions(killed.run, folder)


def check_conversions(run: Path, folder: Path) -> None:
    """The last checkpoint becomes the run's export, and comes back; both verified by bits, and by the outputs of two implementations."""
    checkpoint = list_checkpoints(run)[-1]
    assert checkpoint.name == "step_000004"
    texts = folder / "texts.txt"
    texts.write_text("1+8=\n23+9=\n")
    policy, critic = checkpoint / "policy" / "weights", checkpoint / "critic" / "weights"
    commands = [
        ("megatron-to-hf", policy, folder / "hf"),
        ("verify", folder / "hf", run / "export" / "hf"),
        ("verify", "--logits", folder / "hf", policy, "--text", texts),
        ("hf-to-megatron", folder / "hf", folder / "megatron"),
        ("verify", folder / "megatron", policy),
        ("megatron-to-hf", critic, folder / "critic"),
        ("verify", folder / "critic", critic),
    ]
    for command in commands:
        result = run_command("convert", *map(str, command))
        assert result.returncode == 0, (command, result.stdout[-2000:], result.stderr[-2000:])
    differs = run_command("convert", "verify", str(folder / "hf"), str(folder / "model"))
    assert differs.returncode == 1, differs.stdout  # training changed the weights, and the comparison sees it
