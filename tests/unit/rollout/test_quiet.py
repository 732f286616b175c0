"""Notices of native code are left out; everything else on stderr is passed on, also when the block raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

CUDA_BUILD = """
import importlib.util, sys, torch
from vapo_mcore.megatron.host import import_megatron
import_megatron()
assert "wandb" not in sys.modules and importlib.util.find_spec("wandb")  # not imported, and importable again
sys.modules.pop("torch.utils.cpp_extension", None)
torch.version.cuda, torch.cuda._is_compiled, torch.cuda.is_available = "13.0", lambda: True, lambda: False
import torch.utils.cpp_extension as extension
assert extension.CUDA_HOME
"""


def test_the_cuda_build_of_torch_does_not_warn_of_a_missing_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CUDA_BUILD]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_only_the_notice_is_left_out() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr == "an error of native code\na warning of Python\nafter the block\n"
