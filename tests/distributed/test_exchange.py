"""Token tensors move to their owners in one all-to-all, THD tensors gather over context parallelism, and replicas meet (4 ranks, gloo)."""

import re

from tests.forks import ROOT, run_ranks

WORKER = "tests/distributed/exchange_worker.py"


def test_exchange_and_gather_on_four_ranks() -> None:
    result = run_ranks(WORKER, 4)
    assert result.returncode == 0, result.stdout + result.stderr
    cases = re.findall(r"^def (\w+)\(\) -> None:", (ROOT / WORKER).read_text(), re.MULTILINE)
    assert re.findall(r"^case (\w+) ok$", result.stdout, re.MULTILINE) == cases
