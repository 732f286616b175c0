"""Peak memory of a conversion follows the largest tensor group, not the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.torchrun import run_bounded

WORKER = Path(__file__).with_name("memory_use.py")


def test_peak_memory_is_bounded_by_the_largest_tensor_group(tmp_path: Path) -> None:
    result = run_bounded([sys.executable, str(WORKER), str(tmp_path)], timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    measured = json.loads(result.stdout)
    bound = 1.5 * measured["largest_group"] + 2**30
    assert measured["total"] > 1.1 * bound  # a model held whole would not pass
    assert max(measured["peaks"]) <= bound, measured
