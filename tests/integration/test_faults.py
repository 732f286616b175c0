"""Faults in whole runs of two processes: what is counted, what stops the run, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import run_ranks
from tests.torchrun import run_torchrun
from tests.training_setup import read_metrics, write_setup

Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def facts(folder: Path) -> Facts:
    return launch(folder)


@pytest.fixture(scope="module")
def vllm_facts(folder: Path) -> Facts:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    return launch(folder, "vllm")


def launch(folder: Path, *arguments: str) -> Facts:
    run = run_torchrun if "vllm" in arguments else run_ranks
    result = run("tests/integration/faults_worker.py", 2, str(folder), *arguments, timeout=240)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line["ranks"] for line in lines}


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / name) if row["step"] > 0]


def test_a_bad_update_is_counted_and_the_run_goes_on(facts: Facts, folder: Path) -> None:
    first, second = rows_of(folder, "skipped")
    assert (first["policy/updates_skipped"], first["policy/updates"]) == (1, 1)
    assert (second["policy/updates_skipped"], second["policy/updates"]) == (0, 3)
    assert first["warnings"] == 1
    assert second["warnings"] == 0
    assert "policy/loss_spikes" not in first  # no such setting
    assert not (folder / "skipped" / "faults").exists()


def test_bad_updates_in_a_row_stop_the_run_after_their_step(facts: Facts, folder: Path) -> None:
    first, second = rows_of(folder, "stopped")
    assert (first["policy/updates"], second["policy/updates"], second["policy/updates_skipped"]) == (2, 2, 2)
    assert second["critic/updates"] == 4
    for rank in facts["bad_updates_in_a_row_stop_the_run"]:
        assert rank["code"] == 2
        assert "2 consecutive updates of the policy were skipped (faults.bad_updates_in_a_row = 2)" in rank["message"]
        assert "the loss is not finite" in rank["message"]
        assert "stopped after step 2 (rl)" in rank["message"]
        assert "its rollout is in " in rank["message"]
    assert (folder / "stopped" / "dumps" / "step_000002" / "step.json").is_file()  # for vapo-mcore replay-step


def test_the_batch_that_a_run_stopped_at_gives_its_update_again(facts: Facts, folder: Path) -> None:
    ranks = facts["bad_updates_in_a_row_stop_the_run"]
    assert [rank["reason"] for rank in ranks] == ["the loss is not finite"] * 2
    mine = [set(rank["mine"]) for rank in ranks]
    assert not mine[0] & mine[1]
    assert len(mine[0] | mine[1]) == 8  # the mini-batch, over both data-parallel ranks
    assert ranks[0]["again"] == ranks[1]["again"]
    assert ranks[0]["again"]["tokens"] == sum(rank["tokens"] for rank in ranks)
    assert abs(ranks[0]["again"]["approx_kl"]) < 1e-6 * ranks[0]["tokens"]  # the weights still are those of the log-prob pass
    assert all(rank["made"] for rank in ranks)


def test_graders_that_are_gone_on_one_rank_end_the_step_on_all(facts: Facts) -> None:
    for rank in facts["graders_gone_for_good"]:
        assert rank["message"] == "rank 1: no process stays alive"


def assert_equal_but_for_the_fault(undisturbed: list[dict[str, Any]], disturbed: list[dict[str, Any]]) -> None:
    for expected, found in zip(undisturbed, disturbed, strict=True):
        for name, value in expected.items():
            if not name.startswith(("time/", "memory/", "tokens/per_second", "sampling/engine_rebuilds")):
                assert found[name] == value, name


def test_after_a_rebuild_of_the_engine_the_run_is_what_it_would_have_been(facts: Facts, folder: Path) -> None:
    """The second step failed on rank 1 alone, after rank 0 had its responses."""
    undisturbed, disturbed = (rows_of(folder, name) for name in ("undisturbed", "engine_once"))
    assert [rank["message"] for rank in facts["engine_fails_once"]] == [None, None]
    assert [row["sampling/engine_rebuilds"] for row in disturbed] == [0, 1]
    assert disturbed[1]["time/engine_rebuild"] > 0
    assert_equal_but_for_the_fault(undisturbed, disturbed)


def test_an_engine_that_fails_again_leaves_a_checkpoint_of_the_step_before(facts: Facts, folder: Path) -> None:
    for rank in facts["engine_fails_again"]:
        assert rank["kind"] == "StepAbandoned"
        assert rank["message"] == (
            "the rollout engine failed again, after 1 rebuilds (faults.engine_rebuilds = 1): rank 1: RuntimeError: the device is lost"
        )
        assert len(rank["checkpoints"]) == 1
        assert rank["checkpoints"][0].endswith("1")
        assert (rank["engine"], rank["engine_bytes"]) == ("BROKEN", 0)  # ended on both ranks, before the models came to be saved
    assert [row["step"] for row in rows_of(folder, "engine_again")] == [1]


def test_a_failure_in_an_evaluation_keeps_the_step_before_it(facts: Facts, folder: Path) -> None:
    for rank in facts["engine_fails_in_an_evaluation"]:
        assert rank["kind"] == "RunStopped"
        assert "the evaluation after step 2 failed: the rollout engine failed: rank 1: RuntimeError" in rank["message"]
        assert len(rank["checkpoints"]) == 1
        assert rank["checkpoints"][0].endswith("2")
    assert [row["step"] for row in rows_of(folder, "engine_evaluation")] == [1, 2]


@pytest.mark.slow
def test_a_rebuilt_engine_generates_the_same_again(vllm_facts: Facts, folder: Path) -> None:
    """The second step failed on rank 1, after rank 0 had its responses: all numbers are those of the run without the fault."""
    undisturbed, disturbed = (rows_of(folder, name) for name in ("engine_undisturbed", "engine_twice"))
    assert [row["sampling/engine_rebuilds"] for row in undisturbed] == [0, 0]
    assert [row["sampling/engine_rebuilds"] for row in disturbed] == [0, 1]
    assert disturbed[1]["time/engine_rebuild"] > 0

    assert_equal_but_for_the_fault(undisturbed, disturbed)


@pytest.mark.slow
def test_a_second_failure_of_the_engine_ends_the_step_on_all_ranks(vllm_facts: Facts) -> None:
    for rank in vllm_facts["engine_fails_twice"]:
        assert rank["message"] == (
            "the rollout engine failed again, after 1 rebuilds (faults.engine_rebuilds = 1): rank 1: RuntimeError: the device is lost"
        )
        assert (rank["engine"], rank["llm"]) == ("BROKEN", False)
        assert len(rank["segments_left"]) <= 2  # one a rank of the last engine, none of the one before
        assert not [name for name in rank["segments_left"] if (Path("/dev/shm") / name).exists()]  # and they end with the process
