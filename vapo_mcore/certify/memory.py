"""Memory between checks."""

from __future__ import annotations

import ctypes
import gc


def release_free_memory() -> None:
    """Give memory that a check has freed back to the system: C's allocator keeps what lies between blocks that are still in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
