"""``benchmarks/gpu_step.py`` with planted defects: ``python -m tests.fake_cuda tests/fake_cuda/planted.py DEFECT,... [ARGUMENT ...]``.

``swapped_rows``: a query head and a key head of layer 1 change places while the policy is loaded. ``crash``: the process is killed by a
signal while it measures values.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock


def crash(bench: Any) -> None:
    del bench
    print("RuntimeError: an illegal memory access was encountered", flush=True)
    os.abort()


def main() -> None:
    from tests.integration.certify_worker import loaded, swapped_rows
    from vapo_mcore.certify.checks import critic

    defects = sys.argv.pop(1).split(",")  # gpu_step.py starts its processes with all that is not its own argument
    with ExitStack() as stack:
        if "swapped_rows" in defects:
            stack.enter_context(loaded(swapped_rows))
        if "crash" in defects:
            stack.enter_context(mock.patch.object(critic, "run", crash))
        runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_step.py"), run_name="__main__")


if __name__ == "__main__":
    main()
