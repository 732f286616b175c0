"""Run a program on fake CUDA devices: ``python -m tests.fake_cuda MODULE_OR_SCRIPT [ARGUMENT ...]``, from the root of the repository.

Exits with 3 if the program itself succeeds but the device has recorded faults, which it prints.
"""

from __future__ import annotations

import runpy
import sys

from tests import fake_cuda


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"{__doc__}".partition("\n")[0])
    fake_cuda.install()
    program = sys.argv[1]
    del sys.argv[0]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    if fake_cuda.FAULTS:
        print("faults on the fake CUDA device:", *fake_cuda.FAULTS, sep="\n  ", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
