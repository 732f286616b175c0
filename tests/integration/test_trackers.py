"""TensorBoard and W&B (offline), the real packages: what they show of a run that was killed and resumed, and what stops no training."""

import base64
import contextlib
import http.server
import importlib.util
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.torchrun import run_bounded
from tests.unit.config_helpers import write_base
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import ConfigError
from vapo_mcore.records.run_dir import RunDirectory
from vapo_mcore.records.trackers import Trackers, check_trackers

KEY = "W_AND_B_KEY_OF_THE_TEST"
BOTH = ("run.tensorboard=true", "run.wandb={project: p, mode: offline, tags: [a, b], group: g}")


def configured(folder: Path, *overrides: str) -> Config:
    return load_config(write_base(folder), [f"run.dir={folder / 'run'}", *overrides])


def row(step: int, reward: float, stage: str = "rl") -> dict[str, Any]:
    return {"step": step, "stage": stage, "reward/mean": reward, "gae/lambda_histogram": [1, 2]}


def start(config: Config) -> RunDirectory:
    run = RunDirectory.create(config.run.dir, clean=False, config_yaml=dump_yaml(config))
    run.start_trackers(config)
    return run


def run_and_die(folder: str) -> None:
    """In a process of its own: a run whose checkpoint is two rows old when it dies."""
    run = start(configured(Path(folder), *BOTH))
    for reward, step, stage in ((0.1, 1, "value_pretraining"), (0.2, 2, "value_pretraining"), (0.3, 1, "rl")):
        run.write_metrics(row(step, reward, stage))
    Path(folder, "position.json").write_text(json.dumps(run.position()))
    for step in (2, 3):
        run.write_metrics(row(step, -1.0))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run of ``run_and_die``, resumed from its checkpoint: it goes on with other numbers."""
    folder = tmp_path_factory.mktemp("trackers")
    script = f"from tests.integration.test_trackers import run_and_die; run_and_die({str(folder)!r})"
    assert run_bounded([sys.executable, "-c", script], timeout=120).returncode == -signal.SIGKILL
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    config = configured(folder, *BOTH)
    position = json.loads((folder / "position.json").read_text())
    run = RunDirectory.resume(config.run.dir, **position, config_yaml=dump_yaml(config))
    run.start_trackers(config)
    for step in (2, 3, 4):
        run.write_metrics(row(step, 0.25 * step))
    run.close()
    assert [json.loads(line)["trackers/failed"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [0] * 6
    return run


def test_tensorboard_shows_each_step_of_a_resumed_run_once(resumed: RunDirectory) -> None:
    assert scalars(resumed) == {
        "value_pretraining/reward/mean": [(1, 0.1), (2, 0.2)],
        "reward/mean": [(1, 0.3), (2, 0.5), (3, 0.75), (4, 1.0)],
        "value_pretraining/trackers/failed": [(1, 0), (2, 0)],
        "trackers/failed": [(1, 0), (2, 0), (3, 0), (4, 0)],
    }


def test_wandb_offline_holds_each_step_of_a_resumed_run_once(resumed: RunDirectory) -> None:
    folders = list((resumed.path / "wandb").glob("offline-run-*"))
    assert [folder.name.rsplit("-", 1)[1] for folder in folders] == [resumed.run_id]
    records = list(wandb_records(folders[0] / f"run-{resumed.run_id}.wandb"))
    begun = [record.run for record in records if record.HasField("run")]
    found = {(r.run_id, r.project, r.display_name, r.run_group, tuple(r.tags)) for r in begun}
    assert found == {(resumed.run_id, "p", "run", "g", ("a", "b"))}
    settings = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert settings["batch"] == {
        "prompts_per_step": 16,
        "responses_per_prompt": 8,
        "mini_batch_size": 64,
        "max_tokens_per_microbatch": 4096,
    }
    rows = [record.history for record in records if record.HasField("history")]
    history = [(h.step.num, {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in h.item}) for h in rows]
    steps = [(number, shown.get("value_pretraining/step"), shown.get("step")) for number, shown in history]
    assert steps == [(0, 1, None), (1, 2, None), (2, None, 1), (3, None, 2), (4, None, 3), (5, None, 4)]
    rewards = [shown.get("reward/mean", shown.get("value_pretraining/reward/mean")) for _, shown in history]
    assert rewards == [0.1, 0.2, 0.3, 0.5, 0.75, 1.0]


def test_wandb_that_dies_is_counted_and_said_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = start(configured(tmp_path, *BOTH))
    run.write_metrics(row(1, 0.5))
    for pid in children("wandb-core"):
        os.kill(pid, signal.SIGKILL)
    steps = 1
    with caplog.at_level(logging.WARNING):
        while steps == 1 or (not run.trackers.failed and steps < 200):  # the client notices some time after the process is gone
            steps += 1
            run.write_metrics(row(steps, 0.5))
            time.sleep(0.05)
        steps += 1
        run.write_metrics(row(steps, 0.5))
        run.close()
    told = [record.getMessage() for record in caplog.records if "disabling it" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Weights & Biases failed; disabling it for the rest of the run: ")
    failed = [json.loads(line)["trackers/failed"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert (failed[:2], failed[-1], len(failed)) == ([0, 0], 1, steps)
    assert [step for step, _ in scalars(run)["reward/mean"]] == list(range(1, steps + 1))


def test_a_tracker_that_fails_while_rows_are_shown_again_ends_alone() -> None:
    class Fails:
        def write(self, number: int, row: Mapping[str, Any]) -> None:
            raise ValueError(number)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    trackers = Trackers({"it": Fails()}, [row(1, 0.5)])
    assert (trackers.failed, bool(trackers)) == (1, True)
    trackers.write(row(2, 0.5))
    trackers.close()
    assert trackers.failed == 1
    assert not Trackers({})


def test_required_trackers_have_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, *BOTH)
    check_trackers(config.run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"(?s)package tensorboard is not installed.*package wandb is not installed"):
        check_trackers(config.run)
    check_trackers(configured(tmp_path).run)


def test_wandb_online_needs_its_key_and_its_server_before_a_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = configured(tmp_path, f"run.wandb={{project: p, api_key_variable: {KEY}}}").run
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match=f"the environment variable {KEY} .* is not set"):
        check_trackers(run)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for key, expected in (("no" * 20, "rejects the API key in " + KEY), ("odd" * 14, "responds with 500"), ("ye" * 20, None)):
            monkeypatch.setenv(KEY, key)
            if expected is None:
                check_trackers(run)
            else:
                with pytest.raises(ConfigError, match=expected) as error:
                    check_trackers(run)
                assert key not in str(error.value)
    with pytest.raises(ConfigError, match=r"cannot reach .* use mode: offline"):
        check_trackers(run)


def test_an_address_that_is_no_wandb_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = configured(tmp_path, f"run.wandb={{project: p, api_key_variable: {KEY}}}").run
    monkeypatch.setenv(KEY, "k" * 40)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=greet, daemon=True).start()
        for address in (f"http://127.0.0.1:{other.getsockname()[1]}", "http://localhost:abc", "foo"):
            monkeypatch.setenv("WANDB_BASE_URL", address)
            with pytest.raises(ConfigError, match=rf"run\.wandb: cannot reach {address} \(.+\); use mode: offline"):
                check_trackers(run)


def scalars(run: RunDirectory) -> dict[str, list[tuple[int, Any]]]:
    """What TensorBoard shows: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Server(http.server.HTTPServer):
    """Answers like W&B's: knows one key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Server":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        key = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode().removeprefix("api:")
        assert "viewer" in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        self.send_response({"n": 401, "o": 500, "y": 200}[key[0]])
        self.end_headers()
        self.wfile.write(b'{"data": {"viewer": {"id": "someone"}}}')

    def log_message(self, *_: object) -> None: ...


def children(name: str) -> list[int]:
    """Processes that this one started and whose command line holds ``name``."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended by now
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and name.encode() in path.joinpath("cmdline").read_bytes():
                found.append(int(path.name))
    assert found
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: protocol buffers in LevelDB's log format (blocks of 32 KiB; crc, length, kind before each part)."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""
