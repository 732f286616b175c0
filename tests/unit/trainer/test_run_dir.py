"""The run directory: what is written, never reused by accident, never deleting what is not ours."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from vapo_mcore.errors import CheckpointError, ConfigError, RecordError
from vapo_mcore.records.run_dir import RunDirectory, check_position, check_run_directory, finished_steps


def create(path, **kwargs):
    return RunDirectory.create(path, **({"clean": False, "config_yaml": "seed: 1\n"} | kwargs))


def test_metrics_samples_and_config_are_written(tmp_path):
    run = create(tmp_path / "deep" / "run")
    run.write_metrics({"step": 1, "a": 0.5, "none": None, "hist": [1, 2]})
    run.write_metrics({"step": 2, "policy/grad_norm": math.inf, "by_position": [0.5, math.nan, None]})
    run.write_samples("step_0001", [{"response": "3 + 4 = 7 ✓", "score": 1.0}])
    run.close()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 1, "a": 0.5, "none": None, "hist": [1, 2]}
    assert lines[1] == {
        "step": 2,
        "policy/grad_norm": None,
        "by_position": [0.5, None, None],
        "metrics/nonfinite": ["policy/grad_norm", "by_position"],
    }
    assert json.loads((run.path / "samples" / "step_0001.jsonl").read_text())["response"] == "3 + 4 = 7 ✓"
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"


def test_a_run_is_not_reused_without_clean(tmp_path):
    create(tmp_path / "run").close()
    (tmp_path / "run" / "metrics.jsonl").write_text("old\n")
    with pytest.raises(ConfigError, match=r"already holds a run.*--clean"):
        create(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "old\n"
    create(tmp_path / "run", clean=True).close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_clean_never_deletes_a_foreign_directory(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not a run of vapo-mcore"):
        create(tmp_path, clean=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_link_to_a_directory_is_a_directory(tmp_path):
    """A run goes where the link points to; ``--clean`` empties that directory and leaves the link."""
    (tmp_path / "large_disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "large_disk")
    create(link).close()
    (tmp_path / "large_disk" / "metrics.jsonl").write_text("old\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        create(link)
    create(link, clean=True).close()
    assert link.is_symlink()
    assert (tmp_path / "large_disk" / "metrics.jsonl").read_text() == ""
    (tmp_path / "large_disk" / "thesis.tex").touch()
    (tmp_path / "large_disk" / ".vapo_mcore_run").unlink()
    with pytest.raises(ConfigError, match="not a run of vapo-mcore"):
        create(link, clean=True)


@pytest.mark.parametrize("inside", ["", "/deep/run"])
def test_a_link_to_nothing_says_so(tmp_path, inside):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"link' is a symbolic link to '.*unmounted', which does not exist"):
        check_run_directory(f"{tmp_path}/link{inside}", clean=False)


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/deep/run", "/sys/x"])
def test_a_place_where_nobody_can_make_a_directory(place):
    """Not even root, whom permissions stop nowhere."""
    with pytest.raises(ConfigError, match=r"cannot be created: cannot create a directory in '/(proc|sys)': "):
        check_run_directory(place, clean=False)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_leaves_whole_rows_and_no_half_samples(small_disk):
    run = create(small_disk / "run")
    run.write_metrics({"step": 1})
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))
    with pytest.raises(RecordError, match=r"samples/step_0001\.jsonl cannot be written: No space left on device"):
        run.write_samples("step_0001", [{"response": "x" * 10000}])
    assert list(run.samples.iterdir()) == []
    with pytest.raises(RecordError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        run.write_metrics({"step": 2, "much": "x" * 10000})
    assert run.position()["metrics_bytes"] == (run.path / "metrics.jsonl").stat().st_size
    (small_disk / "filler").unlink()
    run.write_metrics({"step": 3})
    assert [row["step"] for row in run.rows()] == [1, 3]
    check_position(run.path, run.position()["metrics_bytes"])
    run.close()


_LIMITED = """
import json, resource, sys
from vapo_mcore.errors import RecordError
from vapo_mcore.records.run_dir import RunDirectory
run = RunDirectory.create(sys.argv[1], clean=False, config_yaml="")
run.write_metrics({"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for write in (lambda: run.write_metrics({"step": 2, "much": "x" * 5000}), lambda: run.write_samples("s", [{"response": "x" * 50000}])):
    try:
        write()
    except RecordError as error:
        print(error)
run.write_metrics({"step": 3})
print(json.dumps([row["step"] for row in run.rows()]))
"""


def test_a_file_size_limit_is_called_one(tmp_path):
    """In a process of its own; what the limit cut off is taken back."""
    out = subprocess.run([sys.executable, "-c", _LIMITED, tmp_path / "run"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    metrics, samples, rows = out.splitlines()
    assert metrics.endswith("metrics.jsonl cannot be written: File too large")
    assert samples.endswith("samples/s.jsonl cannot be written: File too large")
    assert rows == "[1, 3]"
    assert list((tmp_path / "run" / "samples").iterdir()) == []


def test_an_unwritable_place_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        create(tmp_path / "file" / "run")


@pytest.mark.parametrize(("name", "expected"), [("file/a/b", "cannot be created: .*file' is not a directory"), ("a" * 300, "too long")])
def test_an_impossible_place_is_found_before_it_is_made(tmp_path, name, expected):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=expected):
        check_run_directory(tmp_path / name, clean=False)
    check_run_directory(tmp_path / "new" / "deep", clean=False)
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    """Later rows, later samples and exports go; what was there stays; the identity stays."""
    run = create(tmp_path / "run")
    for step in (1, 2):
        run.write_metrics({"step": step, "stage": "rl"})
        run.write_samples(f"step_{step:04d}", [{"response": str(step)}])
    position = run.position()
    run.write_metrics({"step": 3, "stage": "rl"})
    run.write_samples("step_0003", [{"response": "3"}])
    (run.path / "export").mkdir()
    run.mark_finished(3)
    assert finished_steps(run.path) == 3
    run.close()
    again = RunDirectory.resume(run.path, **position, config_yaml="seed: 2\n")
    again.write_metrics({"step": 3, "stage": "rl"})
    again.close()
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert sorted(path.name for path in run.samples.iterdir()) == ["step_0001.jsonl", "step_0002.jsonl"]
    assert not (run.path / "export").exists()
    assert finished_steps(run.path) is None
    assert (run.path / "config.yaml").read_text() == "seed: 2\n"
    assert again.run_id == run.run_id != "unknown"


def dump(run: RunDirectory, name: str) -> None:
    (run.path / "dumps" / name).mkdir(parents=True)
    (run.path / "dumps" / name / "step.json").write_text("{}")


def test_a_resume_takes_the_dumps_of_later_steps_away(tmp_path: Path) -> None:
    """They would be compared with rows of steps made anew; the dump of the checkpoint's own step was written before it and stays."""
    run = create(tmp_path / "run")
    assert run.position()["dumps"] == []
    for name in ("value_pretraining_000002", "step_000004"):
        dump(run, name)
    position = json.loads(json.dumps(run.position()))
    dump(run, "step_000005")
    run.close()
    older = {name: value for name, value in position.items() if name != "dumps"}  # of a checkpoint that knew none
    RunDirectory.resume(run.path, **older, config_yaml="").close()
    assert len(list((run.path / "dumps").iterdir())) == 3
    RunDirectory.resume(run.path, **position, config_yaml="").close()
    assert sorted(path.name for path in (run.path / "dumps").iterdir()) == ["step_000004", "value_pretraining_000002"]


def test_rows_that_a_checkpoint_has_seen_must_be_there(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    run.close()
    with pytest.raises(CheckpointError, match="has 0 bytes, but the checkpoint was saved at 10"):
        RunDirectory.resume(run.path, metrics_bytes=10, written=[], config_yaml="")


def test_a_file_of_rows_that_was_changed_is_noticed(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    for step in (1, 2):
        run.write_metrics({"step": step, "stage": "rl"})
    after, before_the_last = run.position(), run.position(without_last_row=True)
    run.close()
    metrics = run.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert before_the_last["metrics_bytes"] == len(lines[0]) < after["metrics_bytes"] == len(lines[0] + lines[1])
    for position in (after, before_the_last):
        check_position(run.path, position["metrics_bytes"])
    metrics.write_text(lines[0].replace("rl", "value_pretraining") + lines[1])
    with pytest.raises(CheckpointError, match=rf"was changed after .* no row ends at byte {after['metrics_bytes']}"):
        check_position(run.path, after["metrics_bytes"])
    metrics.unlink()
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        check_position(run.path, after["metrics_bytes"])


def test_a_directory_with_a_run_may_be_resumed_and_a_foreign_one_not(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    check_run_directory(tmp_path / "run", clean=False, resume=True)
    check_run_directory(tmp_path / "new", clean=False, resume=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not a run of vapo-mcore"):
        check_run_directory(tmp_path / "foreign", clean=False, resume=True)
