"""Reductions of the algorithm over ranks, one of which has no tokens: equal to one process with the whole batch (3 ranks, gloo)."""

import os
import re
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("algorithm_worker.py")
ROOT = WORKER.parents[2]


def test_reductions_on_three_ranks() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(WORKER)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    listed = re.search(r"^CASES.*?^\]", WORKER.read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    expected = re.findall(r"^    (\w+),$", listed.group(), re.MULTILINE)
    assert re.findall(r"^case (\w+) ok$", result.stdout, re.MULTILINE) == expected and len(expected) == 7
