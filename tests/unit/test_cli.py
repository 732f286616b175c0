"""The command line: exit codes, one message for an error, and no heavy import before everything is checked."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import write_base, write_child, write_model_config
from vapo_mcore import __version__
from vapo_mcore.cli import main
from vapo_mcore.config import load_config
from vapo_mcore.launch.local import report_error
from vapo_mcore.records.run_dir import RunDirectory

HEAVY = ("torch", "transformers", "vllm", "megatron", "numpy")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return write_base(tmp_path)


@pytest.fixture
def weights(base: Path) -> Path:
    """The file of weights of base.yaml's model, complete."""
    import torch
    from safetensors.torch import save_file

    from vapo_mcore.config.architecture import read_architecture
    from vapo_mcore.weights.plan import hf_manifest, plan_mapping

    plan = plan_mapping(read_architecture(base.parent / "model"), "policy")
    file = base.parent / "model" / "model.safetensors"
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in hf_manifest(plan).items()}, file)
    return file


def _in_new_process(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The command in an interpreter of its own, which adds the heavy modules that it imported as the last line of stderr."""
    code = f"""if True:
    import sys
    from vapo_mcore.cli import main
    try:
        code = main(sys.argv[1:])
    except SystemExit as stop:
        code = stop.code
    print(sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)
    sys.exit(code)
    """
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result, time.monotonic() - start


def test_help_version_and_bad_config_import_nothing_heavy(base: Path) -> None:
    bad = write_child(base.parent, "batch: {mini_batch_size: 1000}\n")
    for arguments, code in (
        (["--help"], 0),
        (["--version"], 0),
        (["config", str(bad)], 2),
        (["config", str(base)], 0),
        (["train", str(bad)], 2),
    ):
        result, seconds = _in_new_process(*arguments)
        print(f"vapo-mcore {arguments[0]}: {seconds:.2f} s")
        assert result.returncode == code, result.stderr
        assert result.stderr.endswith("[]\n")
        assert "Traceback" not in result.stderr


def test_config_prints_the_resolved_configuration(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(base), "seed=5", "policy.epochs=2"]) == 0
    printed = capsys.readouterr().out
    again = base.with_name("again.yaml")
    again.write_text(printed)
    assert load_config(again) == load_config(base, ["seed=5", "policy.epochs=2"])


def test_faults_are_printed_once_on_stderr(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("config", "train"):
        assert main([command, str(base), "batch.mini_batch_size=1000", "sed=3"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert lines[0] == f"error: configuration {base}: 2 faults"
        assert [line.split(":")[0].strip() for line in lines[1:]] == ["sed", "batch.mini_batch_size"]


def test_skip_paths(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(base), "model.path=nowhere"]) == 2
    assert "'nowhere' does not exist" in capsys.readouterr().err
    assert main(["config", "--skip-paths", str(base), "model.path=nowhere"]) == 0


def test_settings_may_follow_options(base: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(base), "run.steps=3", "--dry-run", "batch.prompts_per_step=8"]) == 0
    assert "8 prompts x 8 responses = 64 responses, 1 policy updates" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fit"], ["train"], ["train", "x.yaml", "--resum"], ["config", "x.yaml", "--clean"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: vapo-mcore" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"vapo-mcore {__version__}\n"


def test_dry_run_starts_nothing_and_touches_nothing(base: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(base), "--dry-run", "parallel.world_size=2"]) == 0
    out = capsys.readouterr().out
    assert "processes: 2 = tensor 1 x pipeline 1 x context 1 x data 2" in out
    assert "steps: 50 of value pretraining, then 6" in out
    assert not (base.parent / "run").exists()


def test_weights_are_checked_before_anything_starts(base: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete = weights.read_bytes()
    shutil.copytree(weights.parent, base.parent / "critic")
    critic = ["critic.init=saved", f"critic.path={base.parent}/critic", "critic.value_pretraining.steps=0"]
    for content, expected in ((complete[:-1], "is truncated"), (b"", "is truncated or not a safetensors file"), (complete, "")):
        weights.write_bytes(content)
        assert main(["train", str(base), "--dry-run", *critic]) == 2
        message = capsys.readouterr().err
        assert (f"model.path: {weights} {expected}" in message) == bool(expected)
        assert f"critic.path: {base.parent}/critic does not match its config.json (qwen2, role critic)" in message
        assert "score.weight" in message
    write_model_config(weights.parent, num_hidden_layers=5)
    (base.parent / "run").touch()
    (base.parent / "train.jsonl").write_text("{}\n")
    assert main(["train", str(base), "--dry-run"]) == 2
    message = capsys.readouterr().err
    for expected in ("missing tensors (12)", "exists and is not a directory", "row 1, field 'prompt': missing"):  # all at once
        assert expected in message


def test_run_directory_in_use_is_refused_before_anything_starts(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = base.parent / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("mine")
    assert main(["train", str(base), "--clean"]) == 2
    assert "holds files that are not a run of vapo-mcore; nothing was changed" in capsys.readouterr().err
    assert (run / "thesis.txt").read_text() == "mine"


def test_world_size_must_match_torchrun(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(base)]) == 2
    assert "parallel.world_size = 1, but torchrun started 2 processes" in capsys.readouterr().err


def test_only_rank_zero_tells_the_faults_all_ranks_have(base: Path) -> None:
    result, _ = _in_new_process("train", str(base), "sed=3", RANK="1", WORLD_SIZE="2")
    assert (result.returncode, result.stderr) == (2, "[]\n")
    result, _ = _in_new_process("train", str(base), "sed=3", RANK="0", WORLD_SIZE="2")
    assert result.returncode == 2
    assert result.stderr.startswith("error: configuration")


def test_an_error_of_one_rank_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    report_error("a disk is full")
    assert capsys.readouterr().err == "error (rank 1): a disk is full\n"


def test_closed_pipe_is_no_traceback(base: Path) -> None:
    command = [sys.executable, "-m", "vapo_mcore.cli", "config", str(base)]
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_python_m_is_the_command(base: Path) -> None:
    command = [sys.executable, "-m", "vapo_mcore", "config", str(base), "sed=3"]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "sed: unknown key; did you mean 'seed'?" in result.stderr


@pytest.mark.parametrize(("command", "unbuffered"), [("config", ""), ("config", "1"), ("watch", ""), ("watch", "1"), ("--help", "")])
def test_output_that_cannot_be_written_is_one_message(command: str, unbuffered: str, base: Path) -> None:
    """As on a full disk."""
    arguments = {"config": ["config", str(base)], "watch": ["watch", "--once", str(base.parent / "seen")], "--help": ["--help"]}[command]
    RunDirectory.create(base.parent / "seen", clean=False, config_yaml="seed: 1\n").close()
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "vapo_mcore", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (2, "error: cannot write to stdout: No space left on device\n")


def test_an_interrupt_while_libraries_are_imported_ends_at_once(tmp_path: Path) -> None:
    """Though the library catches it, as some do, and would go on for minutes."""
    (tmp_path / "slow_library.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('began').touch()\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n    raise ImportError('cannot import name x')\n"
    )
    code = "from vapo_mcore.interrupts import importing\nwith importing():\n    import slow_library"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "began").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert (process.returncode, told) == (130, "interrupted\n")


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y"])
def test_a_dry_run_refuses_a_place_where_no_directory_can_be_made(
    place: str, base: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(base), "--dry-run", f"run.dir={place}"]) == 2
    assert f"run.dir = '{place}' cannot be created: cannot create a directory in '/proc'" in capsys.readouterr().err
