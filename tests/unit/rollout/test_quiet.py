"""Notices of native code are left out; everything else on stderr is passed on, also when the block raises."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = r"""
import os, sys
from vapo_mcore.rollout.quiet import stderr_without
try:
    with stderr_without(b"NUMA binding"):
        os.write(2, b"[W1 utils.cpp:68] Warning: NUMA binding: node 0\nan error of native code\n")
        print("a warning of Python", file=sys.stderr)
        raise ValueError
except ValueError:
    print("after the block", file=sys.stderr)
"""


def test_only_the_notice_is_left_out() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr == "an error of native code\na warning of Python\nafter the block\n"
