"""Transformer Engine without a GPU: its own Python code, with references in place of its extension's functions.

``install()`` makes the fake CUDA device (``tests/fake_cuda``) available, loads the compiled extension ``transformer_engine_torch`` and
replaces every function that computes: those with a reference (``functions.py``, ``attention.py``) by it, all others by one that raises
NotImplementedError. Enumerations, classes and questions about library versions remain the extension's own. Megatron's Transformer Engine
layers then run forward and backward, from the Python code of Megatron-Core and of Transformer Engine.

It shows names, shapes, layouts, offsets, dtypes and the order of calls. It cannot show that a kernel computes what its reference does.
``make test-gpu-stack`` builds the environment and runs the tests of this folder in it; ``CALLS`` counts the calls of each function, for the
table in docs/gpu_status.md.
"""

from __future__ import annotations

from tests.te_reference.extension import CALLS, install

__all__ = ["CALLS", "install"]
