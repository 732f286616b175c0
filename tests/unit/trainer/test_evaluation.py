"""avg@k by hand: items by id, sets apart, failed responses left out."""

from dataclasses import dataclass

import pytest
import torch

from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.trainer.evaluation import first_of_each_set, summarise
from vapo_mcore.trainer.intervals import wilson_interval


def rows(entries, samples):
    """``entries``: (source, verdicts, graded) of each problem."""
    verdicts = [v for _, vs, _ in entries for v in vs]
    graded = [g for _, _, gs in entries for g in gs]
    n = len(verdicts)
    scores = torch.tensor(verdicts, dtype=torch.float32)
    return Rows(
        prompt_id=[f"{source}/{i}" for i, (source, _, _) in enumerate(entries) for _ in range(samples)],
        group=torch.arange(len(entries)).repeat_interleave(samples),
        sample_index=torch.arange(samples).repeat(len(entries)),
        verdict=torch.tensor(verdicts),
        graded=torch.tensor(graded),
        score=scores,
        reward=scores,
        finish_reason=["stop"] * (n - 1) + ["length"],
        prompt_length=torch.ones(n, dtype=torch.int64),
        response_length=torch.arange(1, n + 1),
        source=[source for source, _, _ in entries for _ in range(samples)],
    )


T, F = True, False


def test_mean_over_problems_of_the_mean_over_graded_samples():
    result = summarise(rows([("a", [T, F], [T, T]), ("b", [T, T], [T, T]), ("a", [T, F], [T, F]), ("a", [F, F], [F, F])], 2))
    a, b = result["a"], result["b"]
    assert a.accuracy == pytest.approx((0.5 + 1.0) / 2)  # the third problem has one verdict, the fourth none
    assert (a.prompts, a.failed) == (2, 3)
    assert (a.low, a.high) == wilson_interval(1.5, 2)
    assert (b.accuracy, b.prompts, b.failed) == (1.0, 2 // 2, 0)
    assert a.length_mean == pytest.approx((1 + 2 + 5 + 6 + 7 + 8) / 6)
    assert (a.truncated_frac, b.truncated_frac) == (pytest.approx(1 / 6), 0.0)


def test_a_set_without_verdicts_is_undefined_and_not_zero():
    result = summarise(rows([("a", [F], [F])], 1))["a"]
    assert (result.accuracy, result.low, result.high, result.prompts) == (None, None, None, 0)
    assert str(result) == "no verdicts"


def test_max_prompts_counts_in_each_set():
    @dataclass
    class Item:
        source: str
        number: int

    items = [Item("a", 1), Item("b", 2), Item("a", 3), Item("a", 4), Item("b", 5)]
    assert [item.number for item in first_of_each_set(items, 2)] == [1, 2, 3, 5]
    assert first_of_each_set(items, None) == items
