"""Signals: the first asks for a stop, even while the main thread sits in a call; the second ends the process at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from vapo_mcore.launch.signals import StopSignals

BUSY = """
import sys, threading
from vapo_mcore.launch.signals import StopSignals
lock = threading.Lock(); lock.acquire()
with StopSignals(lambda name: print("stop", name, flush=True), lambda text: None):
    print("ready", flush=True)
    lock.acquire()  # never: as in a collective that another rank does not join
"""


def test_first_and_second_signal_reach_a_process_that_is_busy_in_a_call() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "stop SIGUSR1\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 128 + signal.SIGTERM


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    stops: list[str] = []
    with StopSignals(stops.append, lambda _: None):
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while not stops and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stops == ["SIGUSR1"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
