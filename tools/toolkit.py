"""What the scripts in this folder share: errors printed without a traceback, folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vapo_mcore.errors import VapoError


def run(main: Callable[[], None]) -> None:
    """Call ``main``; a VapoError is printed alone and ends the process with its exit code.

    Any other exception is a bug and keeps its traceback. SIGTERM ends the process as an exception does, so that what is unfinished is
    cleaned up.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except VapoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def folder_written_atomically(output: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``output`` and rename it to ``output`` on success; on failure nothing is left.

    A previous ``output`` is replaced only once the new content is complete. The caller decides whether replacing is allowed.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        if output.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".replaced", dir=output.parent))
            os.rename(output, replaced)  # onto an empty folder: allowed and atomic
            os.rename(temporary, output)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def saying(activity: str, every: float = 10.0) -> Iterator[None]:
    """Print ``activity`` at once, and again with its time so far ``every`` so many seconds until the block ends."""
    ended, begin = threading.Event(), time.monotonic()
    print(activity, flush=True)

    def repeat() -> None:
        while not ended.wait(every):
            print(f"  {activity}: {time.monotonic() - begin:.0f} s", flush=True)

    thread = threading.Thread(target=repeat, name="saying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
