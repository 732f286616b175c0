"""Folders appear whole or not at all; errors for people carry no traceback."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toolkit

from vapo_mcore.errors import DataError


def test_folder_appears_only_when_complete(tmp_path):
    output = tmp_path / "a" / "model"
    with toolkit.folder_written_atomically(output) as folder:
        (folder / "file").write_text("new")
        assert not output.exists()
    assert (output / "file").read_text() == "new"
    assert [path.name for path in output.parent.iterdir()] == ["model"]


def test_failure_leaves_the_previous_folder_and_no_leftovers(tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "file").write_text("old")

    def fail_midway() -> None:
        with toolkit.folder_written_atomically(output) as folder:
            (folder / "file").write_text("new")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_midway()
    assert (output / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_previous_folder_is_replaced_as_a_whole(tmp_path):
    output = tmp_path / "model"
    output.mkdir()
    (output / "stale").write_text("old")
    with toolkit.folder_written_atomically(output) as folder:
        (folder / "file").write_text("new")
    assert [path.name for path in output.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_errors_for_people_end_with_their_exit_code(capsys):
    def main() -> None:
        raise DataError("no such wheel")

    with pytest.raises(SystemExit) as caught:
        toolkit.run(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: no such wheel\n"


def test_bugs_keep_their_traceback():
    def main() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        toolkit.run(main)


UNFINISHED = """
import sys, time
from pathlib import Path
from toolkit import folder_written_atomically, run

def main():
    with folder_written_atomically(Path(sys.argv[1])) as folder:
        (folder / "file").touch()
        time.sleep(60)

run(main)
"""


def test_sigterm_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", UNFINISHED, str(tmp_path / "model")], cwd=Path(toolkit.__file__).parent)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("*/file")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
