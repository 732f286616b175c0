"""``vapo-mcore watch``: frames of real run directories whose numbers are known, and of a run that is being written."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.config_helpers import write_base
from vapo_mcore.checkpoint_files import checkpoints_folder
from vapo_mcore.cli import main
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.launch.watchdog import heartbeat_folder
from vapo_mcore.records.run_dir import RunDirectory
from vapo_mcore.records.run_lock import RunLock, lock_path
from vapo_mcore.watch.state import RunReader, duration, run_status
from vapo_mcore.watch.view import BARS, PLAIN_BARS, render, sparkline

NOW = time.time()


def create(folder: Path, *overrides: str) -> RunDirectory:
    config = load_config(write_base(folder), ["run.steps=10", "critic.value_pretraining.steps=3", *overrides])
    return RunDirectory.create(config.run.dir, clean=False, config_yaml=dump_yaml(config))


def held_by(run: RunDirectory, seconds_ago: float) -> None:
    lock_path(run.path).write_text(json.dumps({"host": "node1", "pid": 77, "beat": 3}))
    renewed = time.time() - seconds_ago  # not NOW: a reader goes by the clock, and the module may have been loaded minutes ago
    os.utime(lock_path(run.path), (renewed, renewed))


def heartbeat(run: RunDirectory, rank: int, phase: str, since: float, last: float) -> None:
    heartbeat_folder(run.path).mkdir(exist_ok=True)
    record = {"rank": rank, "host": f"node{rank}", "pid": 7, "phase": phase, "step": "rl 4", "since": NOW - since, "last": NOW - last}
    (heartbeat_folder(run.path) / f"rank_{rank:04d}.json").write_text(json.dumps(record))


def frame(path: Path) -> str:
    console = Console(record=True, width=250, file=open(os.devnull, "w"))  # noqa: SIM115 (as long as the console)
    console.print(render(RunReader(path).read(), NOW))
    return console.export_text()


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def row(step: int, stage: str = "rl", **values: Any) -> dict[str, Any]:
    return {"step": step, "stage": stage} | {name.replace("__", "/"): value for name, value in values.items()}


@pytest.fixture
def running(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path)
    run.write_metrics(row(0) | {"eval/chain_sum/avg@4": 0.25, "eval/chain_sum/ci_low": 0.125, "eval/chain_sum/ci_high": 0.5})
    for step in (1, 2, 3):
        run.write_metrics(row(step, "value_pretraining", critic__loss=1 / step, time__step=1.0))
    for step, (reward, seconds) in enumerate(((0.0, 100.0), (0.5, 8.0), (1.0, 10.0)), 1):
        run.write_metrics(row(step, reward__mean=reward, time__step=seconds, policy__updates_skipped=step, grading__failed=0))
    held_by(run, 3)
    heartbeat(run, 0, "generate", 2, 1)
    heartbeat(run, 1, "critic_update", 90, 0)
    (checkpoints_folder(run.path) / "step_000002").mkdir(parents=True)
    os.utime(checkpoints_folder(run.path) / "step_000002", (NOW - 3700, NOW - 3700))
    return run


def test_a_frame_of_a_running_run(running: RunDirectory) -> None:
    found = lines(frame(running.path))
    assert found[:3] == [
        f"{running.path} running (process 77 on node1)",
        "value pretraining 3/3 step 3/10 1 min 10 s left, without evaluations",  # 7 steps of the median, 10 s
        "rank host step phase for last progress",
    ]
    assert found[3:5] == ["1 node1 rl 4 critic_update 1 min 30 s 0 s ago", "0 node0 rl 4 generate 2 s 1 s ago"]
    assert "reward/mean 1 ▁▅█" in found
    assert "time/step 10 █▁▁" in found
    assert "evaluation after step 0: chain_sum avg@4 0.25 [0.125, 0.5]" in found
    assert "checkpoints: step_000002 (1 h 1 min ago)" in found
    assert found[-1] == "faults: policy updates skipped 6"
    assert any(line.startswith("diagnosis: skipped_updates (for 3 steps): 3 updates of the policy and 0") for line in found), found


def test_a_torn_last_line_is_not_shown_and_a_damaged_one_is_said(running: RunDirectory) -> None:
    before = frame(running.path)
    metrics = running.path / "metrics.jsonl"
    with open(metrics, "a") as file:
        file.write('{"step": 4, "stage": "rl", "rew')
    assert frame(running.path) == before
    with open(metrics, "a") as file:
        file.write("\n")
    assert f"{metrics}, line 8: not JSON" in frame(running.path)
    assert "step 3/10" in frame(running.path)


def test_heartbeats_that_cannot_be_understood_are_shown(running: RunDirectory) -> None:
    folder = heartbeat_folder(running.path)
    for rank, content in ((2, "{"), (3, '{"host": "n"}'), (4, '{"host": "[/n]", "phase": "p", "step": "", "since": NaN, "last": 1}')):
        (folder / f"rank_{rank:04d}.json").write_text(content)
    heartbeat(running, 5, "[/red]", 1, 1)  # would be markup
    shown = frame(running.path)
    assert f"{folder}/rank_0002.json is invalid: no JSON object of a rank" in shown
    assert f"{folder}/rank_0003.json has no 'since': written by another version?" in shown
    assert f"{folder}/rank_0004.json is invalid: since nan, last 1.0" in shown
    assert "5 node5 rl 4 [/red] 1 s 1 s ago" in lines(shown)


def test_a_narrow_terminal_shows_the_newest_steps_and_many_ranks_few_faults(running: RunDirectory) -> None:
    for step in range(4, 41):
        running.write_metrics(row(step, reward__mean=float(step == 40), critic__explained_variance=None if step % 2 else 0.5))
    for rank in range(10, 30):
        (heartbeat_folder(running.path) / f"rank_{rank:04d}.json").write_text("[]")
    console = Console(record=True, width=40, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(RunReader(running.path).read(), NOW, width=40))
    shown = console.export_text()
    assert "reward/mean 1 ▁▁▁▁▁▁▁█" in lines(shown)
    assert all(len(line) <= 40 for line in shown.splitlines())
    assert (shown.count("is invalid"), "... and 16 more" in shown) == (4, True)


def test_a_run_that_has_not_written_anything(tmp_path: Path) -> None:
    run = create(tmp_path)
    with RunLock(run.path, print):
        deadline = time.monotonic() + 5
        while run_status(run.path, time.time())[0] != "running" and time.monotonic() < deadline:
            time.sleep(0.01)
        found = lines(frame(run.path))
    assert found[0] == f"{run.path} running (process {os.getpid()} on {os.uname().nodename})"
    assert found[1:] == ["value pretraining 0/3", "no step is done yet", "checkpoints: none yet", "faults: none"]
    assert lines(frame(run.path))[0].endswith("stopped (no process holds it; train --resume continues it)")


def test_stale_hung_and_finished_runs(running: RunDirectory) -> None:
    held_by(running, 3 * 86400 + 4 * 3600)
    text = frame(running.path)
    reason = "no lock renewal by process 77 on node1 for 3 d 4 h; it ended without releasing the run, or its file system hangs"
    assert f"stale ({reason})" in text
    assert "left, without" not in text
    (heartbeat_folder(running.path) / "rank_0000.json").write_text('{"phase"')
    assert "generate" not in frame(running.path)
    (heartbeat_folder(running.path) / "hung").touch()
    assert f"hung (the watchdog ended it; stacks of all ranks: {heartbeat_folder(running.path)})" in frame(running.path)
    running.mark_finished(10)
    assert "finished (10 steps)" in frame(running.path)
    assert "critic_update" not in frame(running.path)


def test_settings_that_cannot_be_read_cost_totals_and_diagnosis_alone(running: RunDirectory) -> None:
    config, reader = running.path / "config.yaml", RunReader(running.path)
    whole = config.read_bytes()
    for content, reason in ((b"nothing: here\n", "nothing"), (b"a: \xff\n", "UTF-8"), (b"", "required"), (None, "No such file")):
        config.unlink() if content is None else config.write_bytes(content)
        for _ in range(3):  # in every frame
            (fault,) = reader.read().faults
            assert fault.startswith("config.yaml cannot be read, so that totals and diagnosis are missing: ") and reason in fault
        text = frame(running.path)
        assert "config.yaml cannot be read" in text and "step 3/?" in text and "reward/mean" in text
    config.write_bytes(whole)
    assert (reader.read().faults, reader.read().totals["rl"]) == ([], 10)


def test_a_reader_follows_a_run_that_is_resumed(running: RunDirectory) -> None:
    reader = RunReader(running.path)
    assert len(reader.read().findings) == 1
    metrics = running.path / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:4]))
    state = reader.read()
    assert (len(state.rows), state.findings, state.counts) == (4, [], {})
    metrics.write_text("".join(rows))
    assert reader.read().counts == {"skipped_updates": 3}


def test_the_first_stage_counts_in_what_is_left(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.write_metrics(row(1, "value_pretraining", time__step=4.0))
    assert RunReader(run.path).read().seconds_left() == 4.0 * (2 + 10)
    run.write_metrics(row(1, time__step=6.0))
    assert RunReader(run.path).read().seconds_left() == 6.0 * 9


@pytest.mark.parametrize(
    ("values", "bars", "expected"),
    [
        ([0.0, 1.0, 2.0, 7.0], BARS, "▁▂▃█"),
        ([1.0, None, 1.0], BARS, "▅ ▅"),
        ([None, None], BARS, "  "),
        ([-1.0, None, 6.0], PLAIN_BARS, "_ #"),
    ],
)
def test_sparklines(values: list[float | None], bars: str, expected: str) -> None:
    assert sparkline(values, bars) == expected


def test_durations() -> None:
    assert [duration(s) for s in (-1, 0.4, 59.4, 60, 200, 3600, 18120, 90000)] == [
        "0 s", "0 s", "59 s", "1 min", "3 min 20 s", "1 h", "5 h 2 min", "1 d 1 h",
    ]  # fmt: skip


def test_the_command_watches_a_run_until_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    run = create(tmp_path, "critic.value_pretraining.steps=0")

    def write() -> None:
        with RunLock(run.path, lambda _: None):
            for step in range(1, 11):
                run.write_metrics(row(step, reward__mean=step / 10, time__step=0.02))
                time.sleep(0.02)
            run.mark_finished(10)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert main(["watch", str(run.path), "--interval", "0.01"]) == 0
    finally:
        writer.join()
    text = capsys.readouterr().out
    assert "finished (10 steps)" in text
    assert "step 10/10" in text
    assert "▁▂▃▃▄▅▆▆▇█" in text
    assert main(["watch", str(run.path), "--once"]) == 0
    assert "step 10/10" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_what_is_no_run_is_an_error(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["watch", str(tmp_path / name), "--once"]) == 2
    assert "give the run directory (run.dir) of a run" in capsys.readouterr().err
    for interval in ("0", "-1", "nan", "inf", "1e30"):
        assert main(["watch", str(tmp_path), "--interval", interval]) == 2
        assert f"--interval {float(interval):g} must be above 0 and at most 86400 seconds" in capsys.readouterr().err


def test_watching_loads_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, vapo_mcore.watch.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
