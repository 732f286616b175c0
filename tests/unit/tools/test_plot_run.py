"""What plot_run reads from metrics.jsonl, and that it writes a PNG."""

import json

import plot_run
import pytest

from vapo_mcore.errors import DataError

ROWS = [
    {"step": 1, "stage": "value_pretraining", "reward/mean": 0.1},
    {"step": 0, "stage": "rl", "eval/addition/avg@4": 0.25, "eval/addition/ci_low": 0.2, "eval/addition/ci_high": 0.3},
    {"step": 1, "stage": "rl", "reward/mean": 0.25, "accuracy/mean": 0.5},
    {"step": 2, "stage": "rl", "reward/mean": None, "accuracy/mean": 0.75, "eval/addition/avg@4": 0.5},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_the_rl_stage_in_order(tmp_path):
    assert plot_run.read_rows(write(tmp_path / "metrics.jsonl", ROWS)) == ROWS[1:]


def test_series_leaves_out_undefined_values():
    assert plot_run.series(ROWS[1:], "reward/mean") == ([1], [0.25])
    assert plot_run.series(ROWS[1:], "accuracy/mean") == ([1, 2], [0.5, 0.75])


def test_running_mean_by_hand():
    assert plot_run.running_mean([1.0, 2.0, 6.0, 10.0], width=3) == [1.0, 1.5, 3.0, 6.0]


def test_evaluations_with_their_intervals():
    points = plot_run.evaluations(ROWS[1:])
    assert points == {"addition avg@4": [plot_run.Point(0, 0.25, 0.2, 0.3), plot_run.Point(2, 0.5, 0.5, 0.5)]}


@pytest.mark.parametrize("rows", [ROWS[1:], [ROWS[2]]])
def test_writes_a_png(tmp_path, rows):
    output = tmp_path / "docs" / "curve.png"
    plot_run.draw(rows, output, "title")
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_was_spent_until_a_step():
    rows = [{"step": 0}, {"step": 1, "time/step": 2.5}, {"step": 2, "time/step": 1.5}]
    assert plot_run.cumulative("a", rows, "time/step") == {0: 0.0, 1: 2.5, 2: 4.0}
    for missing in ({"step": 3}, {"step": 3, "time/step": None}):
        with pytest.raises(DataError, match="run a has no time/step in step 3"):
            plot_run.cumulative("a", [*rows, missing], "time/step")


def test_several_runs_are_one_figure(tmp_path, monkeypatch):
    rows = [row | {"sampling/tokens": 100, "time/step": 2.0} for row in ROWS]
    runs = [tmp_path / name for name in ("plain_1", "plain_2", "other")]
    for run in runs:
        run.mkdir()
        write(run / "metrics.jsonl", rows)
    output = tmp_path / "curves.png"
    monkeypatch.setattr("sys.argv", ["plot_run.py", *map(str, runs), "--output", str(output)])
    plot_run.main()
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError, match="run b has no evaluation"):
        plot_run.draw_several([("a", rows[1:]), ("b", rows[2:3])], output, None)
    with pytest.raises(DataError, match="run c has no sampling/tokens in step 1"):
        plot_run.draw_several([("a", rows[1:]), ("c", ROWS[1:])], output, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "stage": "rl"}\n{"step"\n', "line 2: not JSON"),
        ('{"reward/mean": 1}\n', "line 1: expected an object with an integer 'step'"),
        ('{"step": 1, "stage": "value_pretraining"}\n', "no row of the rl stage"),
    ],
)
def test_damaged_metrics_are_refused(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        plot_run.read_rows(path)


def test_missing_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read: No such file"):
        plot_run.read_rows(tmp_path / "metrics.jsonl")
