"""docs/metrics.md is the table of the code."""

from pathlib import Path

from vapo_mcore.records.metric_table import render_markdown


def test_docs_metrics_is_up_to_date():
    path = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert path.read_text(encoding="utf-8") == render_markdown(), "run: python -m vapo_mcore.records.metric_table > docs/metrics.md"
