"""An update that is bad on one rank of four is made on none: weights, AdamW's state and schedule of all ranks keep their bits."""

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
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("bad_updates") / "qwen2"
    problem.make_model("qwen2", folder)
    result = run_ranks(HERE / "faults_worker.py", 4, str(folder), timeout=180)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["layout"]: line["ranks"] for line in lines}


@pytest.mark.parametrize("layout", ["tp2-dp2", "pp2-dp2"])
@pytest.mark.parametrize(
    ("fault", "reason"), [("gradient", "GRADIENT"), ("nan_loss", "LOSS"), ("infinite_loss", "LOSS"), ("spike", "SPIKE")]
)
def test_a_fault_of_one_rank_changes_nothing_on_any(facts: dict[str, list[dict[str, Any]]], layout: str, fault: str, reason: str) -> None:
    ranks = [rank[fault] for rank in facts[layout]]
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["skipped"] == reason
        assert rank["untouched"]
        assert rank["next_as_if_it_had_not_been"]


def test_the_norm_alone_would_have_missed_a_gradient(facts: dict[str, list[dict[str, Any]]]) -> None:
    """The case is one that the reduced norm cannot show: it counts a weight that TP ranks hold in common on the first of them."""
    assert all(rank["gradient"]["norm_is_finite"] for rank in facts["tp2-dp2"])
    assert not any(rank["gradient"]["norm_is_finite"] for rank in facts["pp2-dp2"])


def test_a_loss_that_is_nan_may_have_finite_gradients(facts: dict[str, list[dict[str, Any]]]) -> None:
    assert all(rank["nan_loss"]["norm_is_finite"] for ranks in facts.values() for rank in ranks)
