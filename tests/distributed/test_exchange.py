"""Token tensors move to their owners in one all-to-all, and THD tensors gather over context parallelism (4 ranks, gloo)."""

import os
import re
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("exchange_worker.py")
ROOT = WORKER.parents[2]


def test_exchange_and_gather_on_four_ranks() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(WORKER)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = set(re.findall(r"^def (\w+)\(\) -> None:", WORKER.read_text(), re.MULTILINE))
    assert set(re.findall(r"^case (\w+) ok$", result.stdout, re.MULTILINE)) == expected
