"""Optimizer steps on two data-parallel ranks: warm-up, steps that all ranks skip together, and the order of epochs."""

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
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("updates") / "qwen2"
    problem.make_model("qwen2", folder)
    result = run_ranks(HERE / "updates_worker.py", 2, str(folder), timeout=180)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_update_k_has_k_over_w_of_the_peak_rate_and_never_0(facts: dict[str, Any]) -> None:
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    warm_up = facts["warm_up"]
    assert warm_up["reported"] == pytest.approx(expected)
    assert [rate for (rate,) in warm_up["used"]] == pytest.approx(expected)  # one rate for all groups
    assert 0.1 < warm_up["first_change"] <= 0.3  # AdamW's first step is about one learning rate


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(facts: dict[str, Any]) -> None:
    for rank in facts["one_rank_is_not_finite"]["ranks"]:
        assert rank["skipped"] == [True, False]
        assert not rank["norm_is_finite"]
        assert rank["unchanged"]
        assert rank["as_if_it_had_not_been"]  # moments and schedule too: the next step gives the same bits
        assert rank["rates"] == pytest.approx([0.5, 0.5])
        assert rank["updates"] == [2, 2]


def test_all_critic_epochs_before_all_policy_epochs_equal_taking_turns(facts: dict[str, Any]) -> None:
    assert facts["orders_of_epochs"]["equal"]


def test_returns_outside_a_categorical_head_are_counted_over_all_ranks_and_end_the_step_on_all(facts: dict[str, Any]) -> None:
    one, other = facts["returns_outside"]["ranks"]
    assert one == other, "the rank without such returns raises as well"
    assert one[0] == pytest.approx(1 / 150)
    assert "2.0% of the returns lie outside [0, 1]" in one[1] and "they run from 0.5 to 1.5" in one[1]


@pytest.mark.parametrize("place", ["device", "host"])
def test_an_update_outside_the_schedule_follows_its_own_gradient_and_repeats_no_momentum(facts: dict[str, Any], place: str) -> None:
    found = facts["update_outside_the_schedule"][place]
    assert found["unmoved"], "without a gradient of its own it changes neither weights nor first moments"
    assert found["worst"] < 1e-6 < 1e-4 < found["moved"]
    assert found["along_momentum"] > 0, "its gradient is opposite to the ordinary ones, so it moves with their first moment, not against it"
