"""Use one thread per process in all tests, and start the longest files first.

One thread: results do not depend on the machine, and several processes share the cores. The longest first: with two files at a time none of
them is left to run alone at the end.
"""

import os

import hypothesis
import pytest

LONGEST_FIRST = (
    "distributed/test_layouts.py",
    "integration/test_train_step.py",
    "integration/test_vllm_engine.py",
    "integration/test_train_cli.py",
    "integration/test_resume_in_process.py",
    "integration/test_horizon_in_process.py",
    "integration/test_horizon_turns.py",
    "fake_cuda/test_fake_cuda.py",
    "slurm/test_slurm.py",
    "chaos/test_kills.py",
    "integration/test_replay_step.py",
    "distributed/weights/test_weights.py",
    "distributed/test_offload.py",
    "distributed/test_cpu_optimizer.py",
    "unit/weights/test_bad_input.py",
    "unit/rewards/test_pool.py",
    "unit/rollout/test_transformers_engine.py",
    "unit/trainer/test_scored_responses.py",
)
"""All other files follow in pytest's order. xdist keeps it with ``--no-loadscope-reorder``."""

os.environ["OMP_NUM_THREADS"] = "1"
hypothesis.settings.register_profile("any_machine", deadline=None)  # the time of an example depends on the machine
hypothesis.settings.load_profile("any_machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(places)))
