"""Runs on a real Slurm of two fake nodes: sbatch and nemo-run, the warning signal, requeue and resume, a rank that dies, refusals.

Needs root (for the daemons' namespaces) and installs Slurm where it is missing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.slurm import fake_cluster
from tests.slurm.fake_cluster import FakeCluster
from tests.torchrun import ROOT
from tests.training_setup import read_metrics, write_setup
from vapo_mcore.cli import main
from vapo_mcore.config import load_config

SECRET = "value-of-the-secret-a1b2c3"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of the test's Slurm need root")


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    if not fake_cluster.installed():
        fake_cluster.install()
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_slurm_") as folder:
        Path(folder).chmod(0o755)  # munge wants its socket to be reachable by all; pytest's folders are not
        with FakeCluster(Path(folder)) as running:
            yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of two processes, one a node, and the settings of the cluster."""
    folder = write_setup(tmp_path_factory.mktemp("run"))
    settings = {
        "account": "test",
        "partition": "batch",
        "time": "00:10:00",
        "logs": str(folder / "logs"),
        "processes_per_node": 1,
        "path": str(Path(sys.executable).parent),
        "environment": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def submitting(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process talks to the fake cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    monkeypatch.setenv("PWD", str(ROOT))
    monkeypatch.chdir(ROOT)


def _launch(folder: Path, *arguments: str) -> list[str]:
    file = folder / "base.yaml"
    return ["launch", str(file), "--executor", "slurm", "--cluster", str(folder / "cluster.yaml"), *arguments]


def _steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run) if row["stage"] == "rl"] if (run / "metrics.jsonl").is_file() else []


def _ranks(job_id: str) -> dict[int, int]:
    """Process ids of a job's ranks, by rank: what torchrun has started, not what these have started in turn."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                mine, above = _environment(path), _environment(path.parent / parent)
                if mine.get(b"SLURM_JOB_ID") == job_id.encode() and b"RANK" in mine and b"RANK" not in above:
                    found[int(mine[b"RANK"])] = int(path.name)
    return found


def _environment(process: Path) -> dict[bytes, bytes]:
    return dict(line.partition(b"=")[::2] for line in (process / "environ").read_bytes().split(b"\0"))


def _job_environment(cluster: FakeCluster) -> dict[str, str]:
    """For jobs of the files in slurm/: this Python, one process a node."""
    own = {"VAPO_PATH": str(Path(sys.executable).parent), "VAPO_PROCESSES": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**cluster.environment, **own}


def test_two_nodes_by_sbatch_are_warned_queued_again_and_resumed(cluster: FakeCluster, folder: Path) -> None:
    run = folder / "sbatch"
    environment = _job_environment(cluster)
    command = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", "--time=00:10:00", f"--output={folder}/sbatch.out"]
    settings = [f"run.dir={run}", "run.steps=12", "critic.value_pretraining.steps=1", "eval.at_start=false", "eval.at_end=false"]
    command += [str(ROOT / "slurm" / "vapo.sbatch"), "train", str(folder / "base.yaml"), *settings]
    submitted = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    cluster.wait_for("a step", lambda: len(_steps(run)) >= 2, 300)
    cluster.run("scancel", "--signal=USR1", job_id)  # what --signal=USR1@300 sends
    cluster.wait_for("requeue", lambda: cluster.job(job_id).get("Restarts") == "1", 120)
    before = len(_steps(run))
    assert 2 <= before < 12
    cluster.wait_for("the end", lambda: cluster.job(job_id)["JobState"] in ("COMPLETED", "FAILED"), 300)
    output = (folder / "sbatch.out").read_text()
    assert cluster.job(job_id)["JobState"] == "COMPLETED", output
    assert _steps(run) == list(range(1, 13)), output
    assert f"job {job_id}, run 0: exit code 75" in output
    assert f"job {job_id}, run 1: exit code 0" in output


@pytest.mark.slow
def test_by_nemo_run_one_dead_rank_ends_the_job(
    cluster: FakeCluster, folder: Path, submitting: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "nemo"
    monkeypatch.setenv("VAPO_TEST_SECRET", SECRET)
    settings = [f"run.dir={run}", "run.steps=1000", "critic.value_pretraining.steps=1", "eval.at_start=false"]
    assert main(_launch(folder, "--set", "secrets=[VAPO_TEST_SECRET]", *settings)) == 0
    job_id = capsys.readouterr().out.split("job ")[1].split()[0]
    cluster.wait_for("a step", lambda: len(_steps(run)) >= 1, 300)
    ranks = _ranks(job_id)
    assert sorted(ranks) == [0, 1]
    assert f"VAPO_TEST_SECRET={SECRET}".encode() in Path(f"/proc/{ranks[1]}/environ").read_bytes()
    os.kill(ranks[1], signal.SIGKILL)
    start = time.monotonic()
    cluster.wait_for("the failure", lambda: cluster.job(job_id)["JobState"] not in ("RUNNING", "COMPLETING"), 60)
    job = cluster.job(job_id)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")
    assert not job["ExitCode"].startswith("0:")
    assert time.monotonic() - start < 60
    assert _ranks(job_id) == {}
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "train_sbatch.sh" for path in written)
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    packed = [text for path in written if path.name == "_TASKS" for pair in json.loads(path.read_text()) for text in pair]
    packed += [path.read_text() for path in written if path.name == "_CONFIG"]
    unpacked = [zlib.decompress(base64.urlsafe_b64decode(text)).decode() for text in packed]
    assert any("VAPO_TEST_SECRET" in text or "SlurmExecutor" in text for text in unpacked)
    assert [text for text in unpacked if SECRET in text] == []


def _dependencies(cluster: FakeCluster, job_ids: list[str]) -> list[str]:
    """The jobs that each job waits for; the jobs, which must be on hold, are then cancelled."""
    jobs = [cluster.job(job_id) for job_id in job_ids]
    cluster.run("scancel", *job_ids)
    assert {job["JobState"] for job in jobs} == {"PENDING"}
    return [job["Dependency"].partition("(unfulfilled")[0] for job in jobs]


def test_chain_by_sbatch(cluster: FakeCluster, folder: Path) -> None:
    def chain(*options: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "slurm" / "chain.sh"), str(folder / "chain"), str(folder / "base.yaml"), "--gpus-per-node=0", *options]
        return subprocess.run(command, env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)

    result = chain("--hold", "--nodes=2", "--", "seed=3")
    assert result.returncode == 0, result.stderr
    names, job_ids = zip(*re.findall(r"(\w+): job (\d+)", result.stdout), strict=True)
    assert names == ("pretrain", "train", "eval")
    commands = [cluster.run("scontrol", "write", "batch_script", job_id, "-") for job_id in job_ids]
    assert all("vapo_mcore.launch.node" in command for command in commands)
    first, second, third = job_ids
    assert _dependencies(cluster, [first, second, third]) == ["(null)", f"afterok:{first}", f"afterok:{second}"]
    result = chain("--partition=nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert "invalid partition specified: nowhere" in result.stderr


@pytest.mark.slow
def test_chain_runs_to_its_evaluation(cluster: FakeCluster, folder: Path) -> None:
    run = folder / "chained_run"
    environment = _job_environment(cluster)
    command = [str(ROOT / "slurm" / "chain.sh"), str(run), str(folder / "base.yaml"), "--gpus-per-node=0", "--nodes=2"]
    command += [f"--output={folder}/%x.out", "--", "run.steps=1", "critic.value_pretraining.steps=1"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    job_ids = re.findall(r": job (\d+)", result.stdout)
    last = job_ids[-1]
    cluster.wait_for("the chain", lambda: cluster.job(last)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 600)
    output = "".join((folder / f"{name}.out").read_text() for name in ("pretrain", "train", "eval") if (folder / f"{name}.out").is_file())
    assert [cluster.job(job_id)["JobState"] for job_id in job_ids] == ["COMPLETED"] * 3, output
    assert [row["stage"] for row in read_metrics(folder / "chained_run_value_pretraining")] == ["value_pretraining"]
    assert {row["stage"] for row in read_metrics(run)} == {"rl"}  # the critic came from the first job
    assert list((folder / "chained_run_eval").rglob("*.json"))


def test_chain_by_nemo_run(cluster: FakeCluster, folder: Path, submitting: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--stages", "pretrain,train,eval", "--set", "sbatch={hold: true}", f"run.dir={folder / 'chained'}"]
    assert main(_launch(folder, *arguments)) == 0
    names, job_ids = zip(*re.findall(r"(\w+): job (\d+)", capsys.readouterr().out), strict=True)
    assert names == ("pretrain", "train", "eval")
    first, second, _ = job_ids
    assert _dependencies(cluster, list(job_ids)) == ["(null)", f"afterok:{first}", f"afterok:{second}"]
    files = [file for file in (folder / "logs" / "configurations").glob("*/*.yaml") if str(folder / "chained") in file.read_text()]
    steps = {file.stem: load_config(file, check_paths=False).run.steps for file in files}
    assert steps == {"pretrain": 0, "train": 2, "eval": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "partition=nowhere"], "invalid partition specified: nowhere"),
        (
            ["--set", "container.image=x.sqsh", "--set", "path=null", "--set", "container.mounts=[/]"],
            "(the pyxis plugin with enroot) is not installed",
        ),
        (["run.dir=/proc/vapo"], "run.dir = '/proc/vapo' cannot be written: /proc"),
        (["--set", "logs=/proc/vapo"], "logs = '/proc/vapo' cannot be written: /proc"),
        (["--after", "4000000"], "--after: Slurm has no job 4000000"),
        (["--set", "nodes=3"], "parallel.world_size = 2 does not fit the cluster's nodes x processes_per_node = 3 x 1"),
        (["parallel.world_size=4", "batch.prompts_per_step=8"], "allocation failure: Requested node configuration is not available"),
    ],
)
def test_refusals_submit_nothing(
    arguments: list[str], message: str, cluster: FakeCluster, folder: Path, submitting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = cluster.run("squeue", "--noheader", "--states=all", "--format=%A")
    assert main(_launch(folder, *arguments)) == 2
    assert message in capsys.readouterr().err
    assert cluster.run("squeue", "--noheader", "--states=all", "--format=%A") == jobs
