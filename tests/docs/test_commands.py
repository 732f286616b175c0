"""Run every command of the pages in one copy of the tree, in the order of the table (``table.py``), as a reader would.

``make test-docs`` leaves out the slow ones and runs some commands smaller; ``make test-docs-slow`` runs everything, and those commands a
second time as written. Run some alone: ``DOCS_TREE=/tmp/tree .venv/bin/python -m pytest tests/docs -k watch`` keeps the copy and continues
with what earlier calls made in it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.docs.command import Command
from tests.docs.conftest import copy_tree
from tests.docs.sessions import SESSIONS, first_difference
from tests.docs.table import COMMANDS
from tests.slurm.fake_cluster import FakeCluster
from tests.torchrun import ROOT, run_bounded


def _name(command: Command) -> str:
    return re.sub(r"[^\w.=-]+", "_", command.written)[-90:]


def _runs(commands: list[Command]) -> list[Any]:
    return [pytest.param(command, id=_name(command), marks=[pytest.mark.slow] if command.slow else []) for command in commands]


@pytest.mark.parametrize("command", _runs([command for command in COMMANDS if command.runs]))
def test_command(command: Command, tree: Path, request: pytest.FixtureRequest) -> None:
    _check(command, f"{command.script} {command.small}".rstrip(), tree, request)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.small], ids=_name)
def test_at_full_size(command: Command, tree: Path, request: pytest.FixtureRequest) -> None:
    shutil.rmtree(tree / "models" / "tiny", ignore_errors=True)  # made smaller by the first run
    _check(command, command.script, tree, request)


def _check(command: Command, script: str, tree: Path, request: pytest.FixtureRequest) -> None:
    """Run ``script`` and check output, files and whatever ``command.look`` looks at."""
    if command.needs and not (tree / command.needs).exists():
        pytest.skip(f"{command.needs} could not be fetched")
    for name, text in command.given.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    cluster: FakeCluster | None = request.getfixturevalue("cluster") if command.slurm else None
    started = time.time()
    output = _run(command, script, tree, cluster)
    if cluster is not None:
        _jobs_end_well(cluster, output, command, tree)
    assert [pattern for pattern in command.says if not re.search(pattern, output)] == [], output
    if command.written in SESSIONS:
        assert first_difference(SESSIONS[command.written], output) is None, output
    for pattern in command.leaves:
        assert any(path.stat().st_mtime >= started - 2 for path in tree.glob(pattern)), f"{pattern} was not written\n{output}"
    if command.look is not None and script == command.script:
        command.look(tree, output)


def _run(command: Command, script: str, tree: Path, cluster: FakeCluster | None) -> str:
    """Run ``command.times`` copies of the script; return the output. Every copy must end with an exit code that the page allows."""
    script = script.replace("PORT", str(_free_port()))
    bounded = ["timeout", "--kill-after=60", str(command.seconds), "bash", "-c", script]  # at SIGTERM launchers end their processes, too
    with ThreadPoolExecutor(command.times) as pool:
        running = [
            pool.submit(run_bounded, bounded, timeout=command.seconds + 90, cwd=tree, environment=_environment(tree, cluster))
            for _ in range(command.times)
        ]
        results = [process.result() for process in running]
    output = "".join(result.stdout + result.stderr for result in results)
    if command.offline and any(result.returncode for result in results) and re.search(command.offline, output):
        pytest.skip(f"there is no package index here: {output.strip().splitlines()[-1]}")
    assert all(result.returncode in command.codes for result in results), f"{script}\n{[r.returncode for r in results]}\n{output[-12000:]}"
    return results[0].stdout if command.look is not None and not command.says else output


def _environment(tree: Path, cluster: FakeCluster | None) -> dict[str, str]:
    """A reader's, after ``. .venv/bin/activate``; the package is the copy's."""
    ours = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH", "PWD")}
    ours |= {"PATH": f"{tree}/.venv/bin:{ours['PATH']}", "PYTHONPATH": str(tree)}
    if cluster is not None:
        ours |= {"SLURM_CONF": str(cluster.configuration), "VAPO_PROCESSES": "1", "OMP_NUM_THREADS": "1"}
    return ours


def _jobs_end_well(cluster: FakeCluster, output: str, command: Command, tree: Path) -> None:
    """The jobs that were submitted are done, without an error; those that are held are in the queue, and are cancelled."""
    jobs = re.findall(r"job (\d+)", output)
    assert jobs, output
    if command.held:
        states = [cluster.job(job)["JobState"] for job in jobs]
        cluster.run("scancel", *jobs)
        assert set(states) == {"PENDING"}, states
        return
    cluster.wait_for(
        "the jobs", lambda: all(cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING") for job in jobs), command.seconds
    )
    written = "".join(path.read_text(encoding="utf-8") for job in jobs for path in tree.glob(f"*-{job}.out"))
    assert [cluster.job(job)["JobState"] for job in jobs] == ["COMPLETED"] * len(jobs), written


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_recorded_setup(tmp_path: Path) -> None:
    """``make setup`` in another copy, whose environment sees the packages of ours: the real script, pip and imports, no downloads."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    ours = Path(spec.origin).parents[1]
    copy_tree(tmp_path)
    (tmp_path / ".venv").unlink()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    (theirs,) = (tmp_path / ".venv" / "lib").glob("python*/site-packages")
    for package in ours.glob("pip*"):
        shutil.copytree(package, theirs / package.name)
    (theirs / "ours.pth").write_text(f"{ours}\n", encoding="utf-8")
    result = run_bounded(["make", "setup", f"PYTHON={sys.executable}"], timeout=570, cwd=tmp_path, environment=dict(os.environ))
    assert result.returncode == 0, result.stdout + result.stderr
    if "CUDA build" in result.stdout:
        pytest.skip("recorded with the CPU build of torch")
    assert first_difference(SESSIONS["make setup"], result.stdout) is None, result.stdout


def test_every_recorded_session_is_compared() -> None:
    """Each recorded command is run by a test above, and none is recorded with nothing printed."""
    run = {command.written for command in COMMANDS if command.runs} | {"make setup"}
    assert set(SESSIONS) <= run and all(SESSIONS.values()), set(SESSIONS) - run


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.by_ci], ids=_name)
def test_ci_runs_it(command: Command) -> None:
    """Itself, or as what another of its commands needs."""
    called = re.findall(r"(?m)^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    rules = dict(re.findall(r"(?m)^([\w-]+):(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8")))
    called += [target for name in called for target in rules[name].split()]
    assert command.written.removeprefix("make ") in called
