"""Runs that are killed (-9) at random times, saves included, and resumed: what they leave is what an uninterrupted run leaves.

``make test`` has three of them, ``make test-chaos`` all 25 and ten with open responses (``rollout.horizon``). The time of each
kill is drawn from a fixed seed, but what the run does at that time is chance: a failure names the number of the kill, and the folder of
the run stays.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forked, servers
from tests.training_setup import TURNS, read_metrics, read_samples, write_setup
from vapo_mcore.checkpoint_files import list_checkpoints

KILLS, IN_MAKE_TEST = 25, 3
KILLS_WITH_HORIZON = 10
SETTINGS = [
    "parallel.world_size=1",
    "batch={prompts_per_step: 8, responses_per_prompt: 2, mini_batch_size: 8, max_tokens_per_microbatch: 96}",
    "run.steps=5",
    "rollout.max_response_length=24",
    "reward.timeout_seconds=600",
    "policy.optimizer.warmup_rollouts=4",
    "critic.value_pretraining={steps: 2, lr: 0.01, head_only: true}",
    "eval={every_steps: 2, samples_per_prompt: 1}",
    "checkpoint={every_steps: 1, keep_last: 2, keep_best: 1, best_metric: reward/mean, reshardable_every: 2}",
    "algorithm.kl={place: loss, kind: k3, coef: 0.1}",
]
"""Seven rollouts of 8 prompts over 40: the first epoch ends within the sixth; the warm-up is half done after the fourth."""

HORIZON = [
    "run.samples_per_step=24",
    "rollout.stop_token_ids=[10, 20, 30, 40, 50, 60, 75, 80, 90, 100, 110, 120]",  # about one token in ten ends a response
    "algorithm.policy_loss.importance_correction.kind=token_truncate",
]
HORIZONS = {
    mode: [*HORIZON, f"rollout.horizon={{tokens: 5, in_flight: 24, train: {mode}, max_segments: 4}}"] for mode in ("segments", "completed")
}
HORIZONS["turns"] = [*HORIZONS["segments"], TURNS]
"""Runs with responses open over up to four steps; the second epoch begins while some of the first are open."""


class Runs:
    """The runs of a folder, each a process that is forked, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: Forked | None = None

    def start(self, name: str, *options: str) -> int:
        """Begin a run; its process id."""
        log = self.folder / f"{name}.log"
        settings = [*SETTINGS, f"run.dir={self.folder / name}", *options]
        self._last = servers()[0].start(["-m", "vapo_mcore.cli", "train", str(self.folder / "base.yaml"), *settings], log, log, {})
        return self._last.pid

    def ended(self) -> int:
        """Wait for the run; its exit code, or -signal."""
        assert self._last is not None
        return self._last.wait(300)

    def close(self) -> None:
        """What is left of the last run ends."""
        if self._last is not None:
            self._last.signal_all(signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(write_setup(tmp_path_factory.mktemp("chaos"), model="qwen2_tied"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> tuple[Path, float]:
    """The run that nobody kills, and its seconds."""
    start = time.monotonic()
    runs.start("uninterrupted")
    assert runs.ended() == 0, (runs.folder / "uninterrupted.log").read_text()[-4000:]
    return runs.folder / "uninterrupted", time.monotonic() - start


@pytest.fixture(scope="module")
def uninterrupted_with_horizon(runs: Runs) -> Callable[[str], tuple[Path, float]]:
    """The runs with a horizon that nobody kills, each when it is first needed, and their seconds."""

    @functools.cache
    def made(mode: str) -> tuple[Path, float]:
        start = time.monotonic()
        runs.start(f"uninterrupted_{mode}", *HORIZONS[mode])
        assert runs.ended() == 0, (runs.folder / f"uninterrupted_{mode}.log").read_text()[-4000:]
        return runs.folder / f"uninterrupted_{mode}", time.monotonic() - start

    return made


def outcome(run: Path) -> dict[str, Any]:
    """All that must be the same: every row but for times and memory, the exported weights, the samples."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith(("time/", "memory/")) and key != "tokens/per_second"}
        for row in read_metrics(run)
    ]
    weights = {path.name: path.read_bytes() for path in (run / "export" / "hf").glob("*.safetensors")}
    samples = {path.name: path.read_bytes() for path in (run / "samples").iterdir()}
    return {"rows": rows, "weights": weights, "samples": samples}


def kill(runs: Runs, pid: int, run: Path, draw: random.Random, seconds: float, *, in_a_save: bool) -> None:
    """SIGKILL after a random part of ``seconds``, or a moment after a random save has begun."""
    if in_a_save:
        saves = draw.randint(1, 6)
        deadline = time.monotonic() + 3 * seconds
        seen: set[str] = set()
        while len(seen) < saves and time.monotonic() < deadline and _alive(pid):
            seen |= {path.name for path in (run / "checkpoints").glob(".incomplete-*")}
        time.sleep(draw.uniform(0, 0.03))
    else:
        time.sleep(draw.uniform(0, seconds))
    if _alive(pid):
        os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[] if number < IN_MAKE_TEST else [pytest.mark.slow]) for number in range(KILLS)]
)
def test_a_killed_run_continues_as_if_nothing_had_happened(runs: Runs, uninterrupted: tuple[Path, float], number: int) -> None:
    kill_and_resume(runs, uninterrupted, f"killed_{number}", number, random.Random(f"kill {number}"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS_WITH_HORIZON))
def test_a_killed_run_with_open_responses_continues_them(
    runs: Runs, uninterrupted_with_horizon: Callable[[str], tuple[Path, float]], number: int
) -> None:
    mode = ("segments", "completed", "turns")[(number + number // 3) % 3]  # one of each is killed in a save
    reference, seconds = uninterrupted_with_horizon(mode)
    steps = [row for row in read_metrics(reference) if row["stage"] == "rl" and row["step"] > 0]
    assert all(row["horizon/cut"] > 0 for row in steps) and max(row["horizon/segments_max"] for row in steps) == 4
    trained = [entry["prompt_id"] for row in steps for entry in read_samples(reference, f"step_{row['step']:04d}")]
    state = json.loads((list_checkpoints(reference)[-1] / "state.json").read_text())["objects"]["open_responses"]
    names = trained + [response["prompt"] for response in state["responses"]]
    assert {name.rpartition("#")[2] for name in names} == {"0", "1"}  # of both epochs
    draw = random.Random(f"kill with horizon {number}")
    kill_and_resume(runs, (reference, seconds), f"killed_{mode}_{number}", number, draw, *HORIZONS[mode])


def kill_and_resume(runs: Runs, reference_run: tuple[Path, float], name: str, number: int, draw: random.Random, *options: str) -> None:
    """Kill a run, some in a save or while they resume, resume it, and compare all that it leaves with ``reference_run``."""
    reference, seconds = reference_run
    run = runs.folder / name
    for attempt in range(5):
        kill(runs, runs.start(name, *options), run, draw, seconds / 2**attempt, in_a_save=number % 3 == 1)
        if (status := runs.ended()) != 0:
            break
        shutil.rmtree(run)  # it was faster than the signal
    assert status == -signal.SIGKILL, (runs.folder / f"{name}.log").read_text()[-4000:]
    if number % 5 == 2:  # and killed again while it resumes
        kill(runs, runs.start(name, "--resume", *options), run, draw, seconds, in_a_save=False)
        status = runs.ended()
        assert status in (0, -signal.SIGKILL), (runs.folder / f"{name}.log").read_text()[-4000:]
    leftover = [path.name for path in (run / "checkpoints").glob(".incomplete-*")]
    runs.start(name, "--resume", *options)
    log = (runs.folder / f"{name}.log").read_text()
    assert runs.ended() == 0, (runs.folder / f"{name}.log").read_text()[-4000:]
    print(f"kill {number}: status {status}, unfinished saves {leftover}")
    expected, found = outcome(reference), outcome(run)
    assert [row["step"] for row in found["rows"]] == [row["step"] for row in expected["rows"]], log
    for row, other in zip(expected["rows"], found["rows"], strict=True):
        assert {key for key in row.keys() | other.keys() if row.get(key) != other.get(key)} == set(), (row["step"], row["stage"])
    assert found["weights"] == expected["weights"]
    assert found["samples"] == expected["samples"]
    assert not list((run / "checkpoints").glob(".incomplete-*"))
    assert 2 <= len([path for path in (run / "checkpoints").iterdir() if path.name.startswith("step_")]) <= 3  # the last two and the best


def test_a_finished_run_says_so_and_does_nothing(runs: Runs, uninterrupted: tuple[Path, float]) -> None:
    run, _ = uninterrupted
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    runs.start("uninterrupted", "--resume")
    assert runs.ended() == 0
    assert "is finished (5 steps)" in (runs.folder / "uninterrupted.log").read_text().splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
