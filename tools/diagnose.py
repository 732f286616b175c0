"""Apply the diagnosis rules to the metrics.jsonl of an existing run, step by step.

    python tools/diagnose.py runs/quickstart
    python tools/diagnose.py runs/quickstart diagnosis.entropy_collapse.fraction=0.3

Thresholds come from the run's configuration; settings after the folder override them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit import run

from vapo_mcore.config import Config, load_config
from vapo_mcore.diagnosis.monitor import Monitor
from vapo_mcore.metrics_file import metric_rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Apply the diagnosis rules to a finished or running run.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="other thresholds")
    args = parser.parse_args()
    config = load_config(args.run / "config.yaml", args.settings, check_paths=False)
    rows = metric_rows(args.run / "metrics.jsonl")
    lines = diagnose(config, rows)
    print("\n".join(lines) if lines else f"nothing found in {len(rows)} rows")


def diagnose(config: Config, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return one line for each time a rule begins to hold, then the number of steps in which each rule held."""
    monitor = Monitor(config)
    lines: list[str] = []
    for row in rows:
        begins: Sequence[Any] = [finding for finding in monitor.observe(row) if finding.in_a_row == 1]
        lines += [f"{row.get('stage', 'rl')} step {row['step']}: {finding}" for finding in begins]
    return lines + [f"{name}: {count} steps" for name, count in monitor.metrics().items()]


if __name__ == "__main__":
    run(main)
