"""Keep expected notices of native code off the console."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stderr_without(notice: bytes) -> Iterator[None]:
    """Capture stderr in the block, including that of native code; then print it without the lines that contain ``notice``."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if notice not in line:
                    os.write(2, line)
