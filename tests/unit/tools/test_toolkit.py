"""Folders appear whole or not at all; errors for people carry no traceback."""

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
