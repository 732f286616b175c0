"""Returns that a categorical value head cannot predict: counted, and an error above 1 % of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from vapo_mcore.config.architecture import ValueBins
from vapo_mcore.errors import StepBroken
from vapo_mcore.experience.batches import Experience
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.records.metric_table import metrics_of
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.updates import require_returns_within

BINS = ValueBins(low=-0.2, high=1.2, bins=14, sigma=0.75)
ONE_RANK = cast(ParallelContext, SimpleNamespace(data_parallel_size=1, data_parallel_group=None))


def check(returns: list[float], mask: list[bool] | None = None) -> float:
    """Run the check on the returns of single tokens and return the recorded share."""
    experience: Any = SimpleNamespace(
        batch={"returns": torch.tensor(returns)}, mask=torch.tensor([True] * len(returns) if mask is None else mask)
    )
    metrics = StepMetrics(metrics_of((), ()))
    require_returns_within(BINS, cast(Experience, experience), ONE_RANK, metrics)
    return cast(float, metrics.reduce(None)["critic/returns_outside_frac"])


def test_up_to_one_percent_is_counted() -> None:
    assert check([0.5] * 100) == 0.0
    assert check([0.5] * 199 + [1.3]) == pytest.approx(0.005)
    assert check([0.5] * 198 + [1.3, -0.3]) == pytest.approx(0.01), "exactly 1 % is no error"
    assert check([1.2, -0.2] * 10) == 0.0, "the bounds themselves are inside"


def test_more_than_one_percent_is_an_error_that_names_share_bounds_and_extremes() -> None:
    with pytest.raises(StepBroken) as caught:
        check([0.5] * 97 + [1.5, -0.75, 1.25])
    message = str(caught.value)
    assert "critic: 3.0% of the returns lie outside [-0.2, 1.2], the bounds of its categorical head (at most 1% may)" in message
    assert "they run from -0.75 to 1.5: give critic.categorical.low and high that contain the rewards" in message
    assert caught.value.exit_code == 2


def test_tokens_without_a_loss_do_not_count() -> None:
    assert check([0.5] * 10 + [9.0] * 90, [True] * 10 + [False] * 90) == 0.0
    with pytest.raises(StepBroken, match=r"50\.0% of the returns"):  # 1 of 2 tokens, however many others there are
        check([0.5, 9.0] + [0.5] * 998, [True, True] + [False] * 998)
    assert check([9.0], [False]) == 0.0, "a rollout without a trainable token has none outside"
