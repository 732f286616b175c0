"""Policy and critic taking turns on the device: what is resident when, bytes that stay flat, and the same run bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forks import run_ranks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "layouts"))
import problem  # noqa: E402


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("offload")
    problem.make_model("qwen2", folder / "qwen2")
    config = json.loads((folder / "qwen2" / "config.json").read_text())
    (folder / "qwen2" / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))  # the rollout engine wants one
    results = []
    for world in (1, 2):  # the first writes the reference file of the layouts worker
        result = run_ranks(HERE / "offload" / "worker.py", world, str(folder), timeout=300)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
        results += [json.loads(line) | {"world": world} for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(case["world"], case["dtype"]) for case in results] == [(w, d) for w in (1, 2) for d in ("float32", "bfloat16")]
    return results


def test_ten_steps_with_offload_equal_ten_steps_without(cases: list[dict[str, Any]]) -> None:
    """Weights, main parameters, moments and step counters are bit-identical, a look at all state in between included."""
    assert all(case["different"] == [] for case in cases)


def test_each_stage_holds_exactly_its_row(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        for stage, row in case["rows"].items():
            held = {name: sorted(parts) for name, parts in case["resident"][stage].items() if parts}
            assert held == row, stage
            for name, parts in case["resident"][stage].items():
                assert all(case["bytes"][name][part] == num_bytes for part, num_bytes in parts.items() if part != "grads")


def test_bytes_stay_flat_and_host_memory_is_the_state(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert set(case["device"]) == {0}
        assert len(set(case["host"])) == 1
        state = sum(parts["params"] + parts["optimizer"] for parts in case["bytes"].values())
        reference = case["bytes"]["policy"]["params"]
        assert state + reference <= case["host"][-1] <= 1.02 * (state + reference)


def test_each_byte_moves_once_each_way_a_step(cases: list[dict[str, Any]]) -> None:
    """The order values, critic update, log-probs, policy update, sync moves each part of each model to the device once and back once;
    the reference costs two fills of the policy's parameters (its own weights are on the host already)."""
    for case in cases:
        state = sum(parts["params"] + parts["optimizer"] for parts in case["bytes"].values())
        params = case["bytes"]["policy"]["params"]
        assert case["moved"][-1] == [state + 2 * params, state]


def test_syncs_in_a_row_with_offload_in_between(cases: list[dict[str, Any]]) -> None:
    """Ten verified syncs of ten different states; their checksums are those of the run that never moves anything."""
    assert all(case["synced"] == [10, 10, True] for case in cases)


def test_reference_weights_in_the_policy_buffers(cases: list[dict[str, Any]]) -> None:
    """The reference gives its own log-probs throughout, and the policy's are the same before and after."""
    assert all(case["reference"] == [True, True, True] for case in cases)
