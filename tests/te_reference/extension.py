"""Load Transformer Engine's extension on the fake device, with its functions replaced."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

CALLS: Counter[str] = Counter()
"""Function of the extension -> calls of its reference in this process."""

OWN = ("get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams")
"""Functions of the extension that answer without a GPU."""


def install(*, tf32: bool = False) -> None:
    """Install the fake CUDA device and Transformer Engine with references. Call it before anything imports either; once is enough.

    Args:
        tf32: round the float32 operands of matrix products as cuBLAS does for Transformer Engine.

    Raises:
        ModuleNotFoundError: Transformer Engine is not installed.
    """
    from tests import fake_cuda
    from tests.te_reference import attention, functions

    functions.ROUND_TO_TF32[0] = tf32
    if "transformer_engine_torch" in sys.modules:
        return
    fake_cuda.install(transformer_engine=True)
    references: dict[str, Callable[..., Any]] = {
        name: getattr(module, name) for module in (functions, attention) for name in module.__all__
    }
    extension = _load()
    missing = sorted(name for name in references if not hasattr(extension, name))
    assert not missing, f"references of functions that the extension lacks: {missing}"
    for name, function in vars(extension).copy().items():
        if callable(function) and not isinstance(function, type) and not name.startswith("__") and name not in OWN:
            setattr(extension, name, _counted(name, references[name]) if name in references else _missing(name))


def _load() -> Any:
    """Load the extension's library before Transformer Engine's modules are imported, which take functions from it by name."""
    sys.modules["transformer_engine.pytorch"] = None  # type: ignore[assignment]
    try:
        from transformer_engine.common import load_framework_extension
    finally:
        del sys.modules["transformer_engine.pytorch"]
    load_framework_extension("torch")  # once: later calls return at once
    return sys.modules["transformer_engine_torch"]


def _counted(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return reference(*args, **kwargs)

    return call


def _missing(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no reference in tests/te_reference")

    return call
