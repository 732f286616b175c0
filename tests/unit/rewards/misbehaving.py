"""Verifiers that do what verifiers must not do; named by import path in the tests of the pool."""

import ctypes
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from vapo_mcore.environments import Observation
from vapo_mcore.rewards import StepReward, StepScores
from vapo_mcore.rewards.worker import initialize_worker


def good(response, ground_truth, metadata):
    return float(response == ground_truth)


def partial(response, ground_truth, metadata):
    return float(response)


def by_response(response, ground_truth, metadata):
    """Does what the response says; anything else is graded."""
    action = ACTIONS.get(response)
    return float(response == ground_truth) if action is None else action()


def _loop():
    while True:
        pass


def _big_power():
    return 7 ** (10**9)  # one C call that holds the interpreter lock for minutes


def _deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(1000)


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


def _fork_and_return():
    os.fork()  # both copies go on: the child must not become a second worker
    return 1.0


def _fork_and_stay():
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(1000)
        time.sleep(1000)
    return 1.0


def _allocate():
    block = bytearray(64 * 2**30)
    return float(len(block) > 0)


def _recurse():
    return _recurse()


class _Untold(Exception):
    def __str__(self):
        raise RuntimeError("no message")


def _raise_untold():
    raise _Untold


ACTIONS = {
    "raise untold": _raise_untold,
    "loop": _loop,
    "sleep": lambda: time.sleep(1000),
    "big power": _big_power,
    "deaf": _deaf,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "kill": _kill,
    "segfault": lambda: ctypes.string_at(0),
    "abort": lambda: os.abort(),
    "fork and return": _fork_and_return,
    "fork and stay": _fork_and_stay,
    "allocate": _allocate,
    "raise": lambda: 1 / 0,
    "sys.exit": lambda: sys.exit(4),
    "recurse": _recurse,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "none": lambda: None,
    "text": lambda: "1.0",
    "too large": lambda: 1.5,
    "negative": lambda: -0.1,
}


def short_sleep(response, ground_truth, metadata):
    time.sleep(float(response))
    return 1.0


def modules(response, ground_truth, metadata):
    """1 if none of the comma-separated modules is imported in the worker."""
    return float(not any(name in sys.modules for name in response.split(",")))


def environment(response, ground_truth, metadata):
    """1 if the variable is not set."""
    return float(response not in os.environ)


def main_module(response, ground_truth, metadata):
    """1 if the worker has not run the parent's main module."""
    return float(sys.modules["__mp_main__"] is sys.modules["__main__"])


def pid(response, ground_truth, metadata):
    with open(response, "a") as file:
        file.write(f"{os.getpid()} {os.getpgrp()}\n")
    return 1.0


def start_or_die(progress, settings):
    """Starts a worker, or ends it at once as long as the number in the file that TEST_POOL_DEATHS names is not used up."""
    with open(os.environ["TEST_POOL_DEATHS"], "r+") as file:
        deaths = int(file.read())
        file.seek(0)
        file.write(str(max(0, deaths - 1)))
        file.truncate()
    if deaths:
        os._exit(7)
    initialize_worker(progress, settings)


not_a_function = 3


def steps(response: str, ground_truth: str, metadata: object) -> StepScores:
    return StepScores(0.5, [StepReward(2, -0.25), StepReward(6, 1.0)])


def steps_unordered(response: str, ground_truth: str, metadata: object) -> StepScores:
    return StepScores(0.5, [StepReward(3, 1.0), StepReward(3, 1.0)])


def steps_outside(response: str, ground_truth: str, metadata: object) -> StepScores:
    return StepScores(0.5, [StepReward(7, 1.0)])


def steps_nan(response: str, ground_truth: str, metadata: object) -> StepScores:
    return StepScores(0.5, [StepReward(3, float("nan"))])


def steps_wrong_type(response: str, ground_truth: str, metadata: object) -> StepScores:
    return StepScores(0.5, [(3, 1.0)])  # type: ignore[list-item]


def answers(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, int]) -> object:
    """Does what the newest turn says."""
    word = turns[-1]
    if word == "hang":
        time.sleep(60)
    if word == "exit":
        os._exit(1)
    if word == "raise":
        raise ValueError("no")
    if word == "number":
        return 1.0
    if word == "nan":
        return Observation("x", math.nan)
    if word == "over":
        return Observation(None, 0.5)
    return Observation(f"{len(turns)} turns, {ground_truth}, {metadata['of']}: {word}")


def _patient(wait: float, turns: Sequence[str], ground_truth: str, metadata: Mapping[str, int]) -> object:
    time.sleep(wait)
    return answers(turns, ground_truth, metadata)


patient = functools.partial(_patient, 0.0)


class Game:
    """Counts its moves, which no other process knows of."""

    def __init__(self) -> None:
        self.moves = 0

    def __call__(self, turns: Sequence[str], ground_truth: str, metadata: Mapping[str, int]) -> Observation:
        self.moves += 1
        return Observation(str(self.moves))


game = Game()
answer_of_game = game.__call__
