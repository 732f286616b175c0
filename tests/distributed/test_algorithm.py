"""Reductions of the algorithm over ranks, one of which has no tokens: equal to one process with the whole batch (3 ranks, gloo)."""

import re
from pathlib import Path

from tests.forks import run_ranks

WORKER = Path(__file__).with_name("algorithm_worker.py")


def test_reductions_on_three_ranks() -> None:
    result = run_ranks(WORKER, 3)
    assert result.returncode == 0, result.stdout + result.stderr
    listed = re.search(r"^CASES.*?^\]", WORKER.read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    expected = re.findall(r"^    (\w+),$", listed.group(), re.MULTILINE)
    assert re.findall(r"^case (\w+) ok$", result.stdout, re.MULTILINE) == expected and len(expected) == 8
