"""Reading metrics.jsonl: whole, and while it grows, is torn at its end, or is cut by a resume."""

from pathlib import Path

import pytest

from vapo_mcore.errors import DataError
from vapo_mcore.metrics_file import GrowingMetrics, metric_rows, whole_rows


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


def test_a_growing_file_is_read_on_and_its_torn_end_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = GrowingMetrics(path)
    assert (metrics.refresh(), metrics.rows) == (False, [])
    path.write_text('{"step": 1}\n{"step": 2, "a"')
    assert (metrics.refresh(), metrics.rows) == (True, [{"step": 1}])
    assert not metrics.refresh()
    with open(path, "a") as file:
        file.write(': "é"}\n{"step": 3}\n')
    assert (metrics.refresh(), metrics.rows) == (True, [{"step": 1}, {"step": 2, "a": "é"}, {"step": 3}])
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
