"""Programs that tests start end when their time is over, with all that they have started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.torchrun import run_bounded

STARTS_ANOTHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
print("started", flush=True)
child.wait()
"""


def test_a_process_in_another_session_that_holds_the_pipe_is_killed_too(tmp_path: Path) -> None:
    """torchrun starts its workers so. If one lived on, reading its output would never end."""
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"did not end within 3 s\nstarted"):
        run_bounded([sys.executable, "-c", STARTS_ANOTHER, str(tmp_path / "pid")], timeout=3)
    assert time.monotonic() - start < 60
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)
