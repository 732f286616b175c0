"""Histograms of the responses, and the columns of the samples file."""

import pytest
import torch

from tests.unit.trainer.rollouts import make_batch, make_rows
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import Round, keep_groups
from vapo_mcore.experience.token_records import COLUMNS, token_columns
from vapo_mcore.records.metric_table import METRICS, TOKEN_LISTS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.step_metrics import record_rows


def recorded(rows):
    metrics = StepMetrics(METRICS)
    record_rows(metrics, rows, rows.response_length * rows.graded, SamplingCounts(1, 1), 32)
    return metrics.reduce(None)


def test_groups_by_their_share_of_right_verdicts():
    """None, 1 of 10 (the second bin between 0 and 1), 3 of 4 graded, 2 of 3, all, and one without a verdict."""
    shares = [(0, 3, 0), (1, 10, 0), (3, 4, 1), (2, 3, 0), (2, 2, 1), (0, 0, 2)]
    groups, scores, graded = [], [], []
    for group, (right, known, failed) in enumerate(shares):
        groups += [group] * (known + failed)
        scores += [1.0] * right + [0.0] * (known - right + failed)
        graded += [True] * known + [False] * failed
    row = recorded(make_rows([3] * len(scores), scores, groups=groups, graded=graded))
    assert {name: row[name] for name in row if name.startswith("grading/failed")} == {
        "grading/failed": 4, "grading/failed_ground_truth": 0, "grading/failed_timeout": 4, "grading/failed_crash": 0,
        "grading/failed_verifier": 0, "grading/failed_environment": 0,
    }  # fmt: skip
    assert row["groups/accuracy_histogram"] == [1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1]
    assert row["groups/mixed_frac"] == pytest.approx(3 / 6)


def test_dynamic_sampling_does_not_hide_the_accuracy_of_what_was_sampled():
    """Two rounds: a group of two all right and one mixed, then one all wrong with one response that has no verdict."""
    first = make_rows([1, 2, 3, 4], [1.0, 1.0, 1.0, 0.0], groups=[0, 0, 1, 1])
    second = make_rows([5, 6], [0.0, 0.0], groups=[0, 0], graded=[True, False])
    rounds = [Round(rows, torch.zeros(len(rows), dtype=torch.int64), make_batch(rows), {}) for rows in (first, second)]
    kept = keep_groups(rounds, [(0, 1)])
    metrics = StepMetrics(METRICS)
    record_rows(metrics, kept.rows, kept.rows.response_length * kept.rows.graded, SamplingCounts(2, 3, 1, 1).with_responses(rounds), 32)
    row = metrics.reduce(None)
    assert (row["accuracy/mean"], row["sampling/accuracy"]) == (0.5, 3 / 5)
    assert (row["response/count"], row["sampling/responses"], row["sampling/tokens"]) == (2, 6, 21)


def test_lengths_in_bins_of_two_tokens():
    assert recorded(make_rows([0, 1, 2, 3, 32], [1.0] * 5))["response/length_histogram"] == [3, 1] + [0] * 13 + [1]
    assert recorded(Rows.empty())["response/length_histogram"] == [0] * 16


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


def test_columns_of_the_shown_responses():
    """Row 1 is not owned, row 2 is not shown; a token without a loss has no numbers."""
    rows = make_rows([2, 3, 4], [1.0, 0.0, 1.0])
    owned = rows.select([0, 2])
    batch = make_batch(owned, [0, 2])
    batch["values"] = torch.arange(10) / 3
    batch["response_mask"][3] = False
    experience = Experience(rows, rows.graded, batch, batch.cu_seqlens, [])
    found = token_columns(experience, {0, 1}, Letters())
    assert found == {0: {"text": ["c", "d"], "rollout_logprob": [-1.0, None], "value": [0.6667, None]}}


def test_every_column_is_documented():
    assert [name for name, _ in TOKEN_LISTS] == ["text", *COLUMNS.values()]
