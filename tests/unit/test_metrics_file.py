"""Reading metrics.jsonl: whole, and while it grows, is torn at its end, or is cut by a resume."""

import json
import re
from pathlib import Path

import pytest

from vapo_mcore.errors import DataError
from vapo_mcore.metrics_file import GrowingMetrics, metric_rows, whole_rows
from vapo_mcore.records.metric_table import METRICS


def test_rows_in_order_and_damage_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        metric_rows(path)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert metric_rows(path) == [{"step": 1}, {"step": 2}]
    for bad, expected in ((b'{"step": 3', "line 3: not JSON"), (b"\xff", "line 3: not JSON"), (b"[1]", "line 3: expected an object")):
        path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + bad)
        with pytest.raises(DataError, match=expected):
            metric_rows(path)


def test_a_torn_last_row_is_left_out_and_other_damage_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        whole_rows(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "a"')
    assert whole_rows(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        whole_rows(path)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"step": true}', "an integer 'step' from 0"),
        ('{"step": 1%s}' % ("0" * 400), "an integer 'step' from 0"),
        ('{"step": -1}', "an integer 'step' from 0"),
        ('{"step": 1, "a": %s}' % ("[" * 200_000), "not JSON"),
        ('{"step": 1, "stage": ["rl"]}', """'stage' is ["rl"], expected one of value_pretraining, rl"""),
        ('{"step": 1, "a": "b"}', """'a' is "b", expected a number or null"""),
        ('{"step": 1, "a": NaN, "b": 1e999}', "'a' is NaN, expected a number or null; 'b' is Infinity"),
        ('{"step": 1, "a": 1%s}' % ("0" * 400), "'a' is a number that is too large, expected a number"),
        ('{"step": 1, "a": [1]}', "'a' is [1], expected a number or null"),
        ('{"step": 1, "gae/lambda_histogram": [1, "b"]}', "expected a list of numbers"),
        ('{"step": 1, "gae/lambda_histogram": [1, NaN]}', "'gae/lambda_histogram' is [1, NaN], expected a list of numbers"),
        ('{"step": 1, "gae/lambda_histogram": 3}', "expected a list of numbers"),
        ('{"step": 1, "critic/values_by_length": [null, "b"]}', "expected a list of numbers and nulls"),
        ('{"step": 1, "critic/tokens_by_length": [1], "critic/values_by_length": []}', "expected as many as critic/values_by_length"),
        ('{"step": 1, "metrics/nonfinite": 1}', "expected a list of names"),
    ],
)
def test_rows_that_the_trainer_does_not_write_are_refused(tmp_path: Path, row: str, expected: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + row + "\n")
    for read in (metric_rows, lambda path: GrowingMetrics(path).refresh()):
        with pytest.raises(DataError, match=re.escape(f"{path}, line 2: ") + ".*" + re.escape(expected)):
            read(path)


def test_rows_that_the_trainer_writes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"step": 0, "stage": "rl", "a": None, "b": 1, "c": -2.5e38, "metrics/nonfinite": ["a"], "groups/accuracy_histogram": [0, 3]}
    row |= {f"critic/{what}_by_{by}": [1, 2] for what in ("values", "returns", "tokens") for by in ("position", "length", "prediction")}
    row |= {f"critic/explained_variance_by_{by}": [None, -0.5] for by in ("position", "length")}
    row |= {"critic/values_by_length": [None, 0.5], "gae/lambda_histogram": None}
    path.write_text(json.dumps(row) + "\n")
    assert metric_rows(path) == [row]


def test_a_growing_file_is_read_on_and_its_torn_end_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = GrowingMetrics(path)
    assert (metrics.refresh(), metrics.rows) == (False, [])
    path.write_text('{"step": 1}\n{"step": 2, "metrics/nonfinite"')
    assert (metrics.refresh(), metrics.rows) == (True, [{"step": 1}])
    assert not metrics.refresh()
    with open(path, "a") as file:
        file.write(': ["é"]}\n{"step": 3}\n')
    assert (metrics.refresh(), metrics.rows) == (True, [{"step": 1}, {"step": 2, "metrics/nonfinite": ["é"]}, {"step": 3}])
    with open(path, "a") as file:
        file.write("{]\n")
    with pytest.raises(DataError, match="line 4: not JSON"):
        metrics.refresh()


@pytest.mark.parametrize("after", ['{"step": 1}\n', '{"step": 1}\n{"step": 2, "x": 0}\n{"step": 3, "x": 1}\n{"step": 4}\n', ""])
def test_a_file_that_a_resume_cut_is_read_anew(tmp_path: Path, after: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    metrics = GrowingMetrics(path)
    assert metrics.refresh()
    path.write_text(after)
    assert metrics.refresh()
    assert metrics.rows == (metric_rows(path))
    path.unlink()
    assert metrics.refresh() == bool(after)
    assert (metrics.rows, metrics.refresh()) == ([], False)


def test_every_list_of_the_table_of_metrics_is_read(tmp_path: Path) -> None:
    """The table says which metrics are lists of means or counts by a bin: the reader accepts lists for exactly these."""
    binned = [metric.name for metric in METRICS if "_by_" in metric.name and metric.name.startswith("critic/")]
    assert len(binned) == 14
    path = tmp_path / "metrics.jsonl"
    row = {"step": 0} | {name: [0, 1] for name in binned}
    path.write_text(json.dumps(row) + "\n")
    assert metric_rows(path) == [row]
