"""The lock of a run directory: live runs keep it, dead ones lose it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vapo_mcore.errors import ConfigError
from vapo_mcore.records.run_lock import RunLock

HOLDER = """
import sys, time
from vapo_mcore.records.run_lock import RunLock
with RunLock(sys.argv[1], print):
    print("held", flush=True)
    sys.stdin.readline()
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_live_run_keeps_its_directory_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    said: list[str] = []
    deadline = time.monotonic() + 5
    while not (tmp_path / ".lock").read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.01)
    with (
        pytest.raises(ConfigError, match=rf"in use by a live run \(process {holder.pid} on host {socket.gethostname()}\)"),
        RunLock(tmp_path, said.append),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path, said.append):
        pass
    assert len(said) == 1 and f"process {holder.pid}" in said[0] and "taking it over" in said[0]
    with RunLock(tmp_path, said.append):
        pass
    assert len(said) == 1  # given up in good order: nothing to say


def test_another_host_s_run_is_alive_while_its_counter_grows(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.wait(0.02):
            count += 1
            lock.write_text(json.dumps({"host": "elsewhere", "pid": 77, "beat": count}))

    lock.write_text(json.dumps({"host": "elsewhere", "pid": 77, "beat": 0}))
    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with pytest.raises(ConfigError, match="process 77 on host elsewhere"), RunLock(tmp_path, said.append, watch_seconds=0.5):
            pass
    finally:
        ended.set()
        thread.join()
    with RunLock(tmp_path, said.append, watch_seconds=0.2):
        assert json.loads(lock.read_text() or "{}").get("pid", os.getpid()) in (os.getpid(), 77)
    assert said[-1].startswith("run.dir: process 77 on elsewhere died without releasing its lock")
    assert "checking for" in said[0]
