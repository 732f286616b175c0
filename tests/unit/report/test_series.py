"""Curves, windows and phases against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vapo_mcore.report import series


def rl(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "stage": "rl", **{name.replace("__", "/"): value for name, value in metrics.items()}}


def pretraining(step: int, **metrics: Any) -> dict[str, Any]:
    return rl(step, **metrics) | {"stage": "value_pretraining"}


def test_a_short_run_has_a_point_a_step_and_pretraining_is_below_0() -> None:
    rows = [rl(0, eval__set__accuracy=0.5), pretraining(1, a=1), pretraining(2, a=2.5), rl(1, a=None, b=3), rl(2, a=4, hist=[1, 2])]
    found = series.curves(rows)
    assert found["x"] == [-2, -1, 1, 2] == found["first"] == found["last"]
    assert found["mean"] == {"a": [1, 2.5, None, 4], "b": [None, None, 3, None]}
    assert found["low"] == found["high"] == {}
    assert found["undefined"] == {"a": 1}


def test_a_long_run_keeps_its_spikes_its_mean_and_its_gaps() -> None:
    values: list[float | None] = [math.sin(step / 50) for step in range(1, 2001)]
    values[776], values[1303] = 40.0, -7.0
    values[1500:1520] = [None] * 20
    rows = [pretraining(step, a=0.5) for step in range(1, 101)] + [rl(step, a=value) for step, value in enumerate(values, 1)]
    found = series.curves(rows)
    assert 480 <= len(found["x"]) <= series.MOST_POINTS
    assert (found["first"][0], found["last"][-1]) == (-100, 2000)
    assert all(first == last + 1 or (last, first) == (-1, 1) for last, first in zip(found["last"], found["first"][1:], strict=False))
    assert max(x for x in found["high"]["a"] if x is not None) == 40
    assert min(x for x in found["low"]["a"] if x is not None) == -7
    assert None in found["mean"]["a"] and found["undefined"] == {"a": 20}
    spike = next(k for k, (a, b) in enumerate(zip(found["first"], found["last"], strict=True)) if a <= 777 <= b)
    inside = [values[step - 1] for step in range(found["first"][spike], found["last"][spike] + 1)]
    assert found["mean"]["a"][spike] == pytest.approx(sum(inside) / len(inside), rel=1e-4)
    assert found["low"]["a"][spike] == pytest.approx(min(inside), rel=1e-4)


def test_windows_add_counts_and_weigh_means_by_tokens() -> None:
    rows = [
        rl(1, gae__lambda_histogram=[1, 2], critic__tokens_by_length=[1, 0, 3], critic__values_by_length=[1.0, None, 2.0],
           critic__returns_by_length=[0.0, None, 1.0]),
        rl(2, gae__lambda_histogram=[3, 4], critic__tokens_by_length=[3, 0, 1], critic__values_by_length=[5.0, None, 6.0],
           critic__returns_by_length=[1.0, None, 0.0]),
    ]  # fmt: skip
    window = series._window("rl", rows)
    assert window["histograms"] == {"gae/lambda_histogram": [4, 6]}
    assert window["profiles"] == {"length": {"tokens": [4, 0, 4], "values": [4, None, 3], "returns": [0.75, None, 0.75]}}


def test_distributions_with_other_bins_than_the_last_are_left_out() -> None:
    def profile(*tokens: int) -> dict[str, Any]:
        return {f"critic/{what}_by_length": list(tokens) for what in ("values", "returns", "tokens")}

    rows = [rl(1, **{"gae/lambda_histogram": [1, 2]}, **profile(5, 6)), rl(2, **{"gae/lambda_histogram": [1, 2, 3]}, **profile(1, 2, 3))]
    first, last = series.windows(rows)
    assert (first["histograms"], first["profiles"]) == ({}, {})
    assert (last["histograms"], last["profiles"]["length"]["tokens"]) == ({"gae/lambda_histogram": [1, 2, 3]}, [1, 2, 3])
    assert series.other_bins(rows) == [{"gae/lambda_histogram", "critic/tokens_by_length"}, set()]


def test_windows_are_of_one_stage_and_cover_every_step() -> None:
    rows = [pretraining(step) for step in range(1, 11)] + [rl(0)] + [rl(step) for step in range(1, 41)]
    found = series.windows(rows)
    assert [window["stage"] for window in found] == ["value_pretraining"] * 4 + ["rl"] * 16
    for stage, last in (("value_pretraining", 10), ("rl", 40)):
        own = [window for window in found if window["stage"] == stage]
        steps = [step for window in own for step in range(window["first"], window["last"] + 1)]
        assert steps == list(range(1, last + 1))
    assert [(w["first"], w["last"]) for w in series.windows([rl(1), rl(2)])] == [(1, 1), (2, 2)]


def test_seconds_by_phase_are_means_over_steps_of_rl() -> None:
    rows = [
        pretraining(1, time__values=100.0),
        rl(1, time__step=3.0, time__generate=2.0, time__eval=9.0, time__run=50.0, time__gpu_hours=0.1),
        rl(2, time__generate=1.0, time__checkpoint=4.0),
    ]
    assert series.phase_seconds(rows) == {"generate": 1.5, "checkpoint": 2.0}
    assert series.phase_seconds(rows[:1]) == {"values": 100.0}


def test_ends_and_rounding() -> None:
    rows = [rl(step, a=float(step)) for step in range(1, 8)] + [rl(8, a=None)]
    assert series.mean_of_ends(rows, "a", 3) == (2.0, 6.0)
    assert series.mean_of_ends(rows, "b", 3) is None
    assert [series.rounded(x) for x in (0.1234567, 123456.7, 2.0, math.nan, None)] == [0.12346, 123460, 2, None, None]
    assert series.flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
