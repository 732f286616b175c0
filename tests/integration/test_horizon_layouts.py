"""Runs with ``rollout.horizon`` on two tensor-parallel ranks, and on the real vLLM: two replicas, and one of two ranks.

train_worker.py makes the runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.horizon_checks import assert_nothing_changes, assert_nothing_is_lost, assert_resumed, assert_turns_are_whole
from tests.torchrun import run_torchrun
from tests.training_setup import write_setup

WORKER = Path(__file__).with_name("train_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["horizon_tp2", "horizon_turns_tp2", "horizon_vllm", "horizon_vllm_tp2", "horizon_turns_vllm"])
def test_a_horizon_on_other_layouts_and_engines(tmp_path: Path, case: str) -> None:
    """As long as the responses, it changes nothing; shorter, nothing is lost, and a stopped run of two replicas continues bit for bit."""
    if "vllm" in case:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = write_setup(tmp_path)
    result = run_torchrun(WORKER, 2, str(folder), case, timeout=600)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    assert f"case {case} ok" in result.stdout
    for mode in ("completed", "segments"):
        assert_nothing_changes(folder / f"{case}_long_{mode}", folder / f"{case}_none")
        assert_nothing_is_lost(folder / f"{case}_{mode}", mode)
        if "turns" in case:
            assert assert_turns_are_whole(folder / f"{case}_{mode}") > 0
        if case in ("horizon_vllm", "horizon_turns_vllm"):
            assert_resumed(folder / f"{case}_{mode}_stopped", folder / f"{case}_{mode}")
