"""Metrics of each training source apart."""

from dataclasses import replace

import pytest

from tests.unit.trainer.rollouts import make_rows
from vapo_mcore.records.metric_table import METRICS, metrics_of
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.step_metrics import record_sources


def test_rewards_verdicts_and_lengths_by_source():
    rows = make_rows([1, 2, 3, 4], [1.0, 0.0, 1.0, 1.0], graded=[True, True, True, False])
    rows = replace(rows, source=["a", "a", "b", "b"])
    metrics = StepMetrics(metrics_of((), ["a", "b", "c"]))
    record_sources(metrics, rows, ["a", "b", "c"])
    found = {name: value for name, value in metrics.reduce(None).items() if name.startswith("source/")}
    assert found == {
        "source/a/responses": 2,
        "source/a/reward": 0.5,
        "source/a/accuracy": 0.5,
        "source/a/length_mean": 1.5,
        "source/b/responses": 2,
        "source/b/reward": 1.0,
        "source/b/accuracy": 1.0,
        "source/b/length_mean": 3.5,
        "source/c/responses": 0,
        "source/c/reward": None,
        "source/c/accuracy": None,
        "source/c/length_mean": None,
    }


@pytest.mark.parametrize("sources", [[], ["only"]])
def test_one_source_has_no_metrics_of_its_own(sources):
    assert metrics_of((), sources) == METRICS
    metrics = StepMetrics(METRICS)
    record_sources(metrics, make_rows([1], [1.0]), sources)
    assert not any(name.startswith("source/") for name in metrics.reduce(None))
