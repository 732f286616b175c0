"""Helpers of the scripts in this folder: print errors without a traceback, write folders atomically, report progress."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vapo_mcore.errors import VapoError
from vapo_mcore.records.console import waiting


def run(main: Callable[[], None]) -> None:
    """Call ``main``. Print a VapoError without traceback and exit with its exit code.

    Any other exception is a bug and keeps its traceback. SIGTERM raises SystemExit, so that unfinished output is cleaned up.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except VapoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def folder_written_atomically(output: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to ``output``. Rename it to ``output`` on success, delete it on failure.

    An existing ``output`` is replaced only when the new content is complete. The caller decides whether replacing is allowed.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp creates a private folder
        if output.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".replaced", dir=output.parent))
            os.rename(output, replaced)  # renaming onto an empty folder is allowed and atomic
            os.rename(temporary, output)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def saying(activity: str) -> Iterator[None]:
    """Print ``activity`` at once, and again with its elapsed time every 10 s until the block ends."""

    def say(text: str) -> None:
        print(text, flush=True)

    say(activity)
    with waiting(f"  {activity}", say):
        yield


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
