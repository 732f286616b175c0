"""Submit jobs as nemo-run experiments: torchrun on this machine, or on Slurm nodes under ``launch/node.py``.

Only this module imports nemo-run.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.errors import EXIT_REQUEUE, ConfigError, VapoError
from vapo_mcore.launch.cluster import LocalConfig, SlurmConfig
from vapo_mcore.launch.stages import StageJob

_SECONDS_FOR_OTHER_NODES = 30  # for the other nodes to end after the first one has


class LaunchError(VapoError):
    """The jobs could not be submitted."""


@dataclass(frozen=True)
class Submission:
    """A sequence of dependent jobs to launch, with their name and place of execution."""

    name: str
    jobs: Sequence[StageJob]
    cluster: SlurmConfig | LocalConfig
    nodes: int
    directory: Path
    logs: Path
    after: Sequence[str] = ()


def import_nemo_run(logs: Path) -> ModuleType:
    """Import nemo-run, with its records in the folder ``logs``. Raises ConfigError if it is not installed."""
    os.environ.setdefault("NEMORUN_HOME", str(logs))  # read on import
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import nemo_run
    except ImportError as error:
        raise ConfigError(f"launch requires nemo-run, which cannot be imported ({error}): pip install -e '.[launch]'") from error
    return nemo_run  # type: ignore[no-any-return]


def render(submission: Submission) -> dict[str, str]:
    """Render the sbatch scripts, by job, without submitting them; ``JOB_ID`` replaces ids that are not known yet.

    Writes only to a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_launch_") as folder:
        run = import_nemo_run(submission.logs)
        with _experiment(run, submission, Path(folder)) as (experiment, output):
            _quietly(output, lambda: experiment.dryrun(log=False, delete_exp_dir=False))
        scripts = {job.name: _script(experiment, job.name) for job in submission.jobs}
    return {name: text.replace(folder, str(submission.logs)) for name, text in scripts.items()}


def submit(submission: Submission) -> dict[str, str]:
    """Submit all jobs to Slurm, each depending on the one before; returns their ids, by job.

    If a job cannot be submitted, cancels those already submitted and raises LaunchError.
    """
    run = import_nemo_run(submission.logs)
    with _experiment(run, submission, submission.logs) as (experiment, output):
        try:
            _quietly(output, lambda: experiment.run(detach=True, tail_logs=False))
        except Exception as error:
            ids = _job_ids(experiment)
            for job_id in ids.values():
                _cancel(job_id)
            cancelled = f"; cancelled: {', '.join(ids.values())}" if ids else ""
            raise LaunchError(f"nothing was submitted{cancelled}: {_reason(error)}") from error
    return _job_ids(experiment)


def run_here(submission: Submission) -> int:
    """Run the jobs on this machine one after the other, printing their output; returns 0, or 1 if one failed."""
    run = import_nemo_run(submission.logs)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for job in submission.jobs:
        one = Submission(submission.name, [job], submission.cluster, 1, submission.directory, submission.logs)
        with _experiment(run, one, submission.logs, quiet=False) as (experiment, _):
            experiment.run(detach=False, tail_logs=True)  # the job ends when the block does
        state = str(getattr(experiment.jobs[0].state, "name", experiment.jobs[0].state))
        if state != "SUCCEEDED":
            print(f"error: job {job.name} ended as {state}; logs in {experiment._exp_dir}", file=sys.stderr)
            return 1
    return 0


@contextmanager
def _experiment(run: ModuleType, submission: Submission, base: Path, *, quiet: bool = True) -> Iterator[tuple[Any, io.StringIO]]:
    """Create an experiment with all jobs and write their configuration files; ``quiet``: capture nemo-run's output in the buffer."""
    identifier = f"{submission.name}_{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    output = io.StringIO()
    experiment = run.Experiment(
        submission.name, id=identifier, base_dir=str(base), log_level="WARNING", skip_status_at_exit=True, enable_goodbye_message=False
    )
    where = output if quiet else sys.stdout
    with redirect_stdout(where):
        experiment.__enter__()
    try:
        previous: list[str] = []
        for job in submission.jobs:
            file = base / "configurations" / identifier / f"{job.name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dump_yaml(job.config), encoding="utf-8")
            script = run.Script(path="vapo_mcore.cli", m=True, entrypoint="python", args=job.arguments(file), env={"LOGLEVEL": "WARNING"})
            executor = _executor(run, submission, base, first=not previous)
            previous = [experiment.add(script, executor=executor, name=job.name, dependencies=previous or None)]
        yield experiment, output
    finally:
        with redirect_stdout(where):
            experiment.__exit__(None, None, None)


def _executor(run: ModuleType, submission: Submission, base: Path, *, first: bool) -> Any:
    cluster = submission.cluster
    environment = {name: shlex.quote(value) for name, value in cluster.environment.items()}
    if isinstance(cluster, LocalConfig):
        world_size = submission.jobs[0].config.parallel.world_size
        return run.LocalExecutor(ntasks_per_node=world_size, launcher="torchrun", env_vars=dict(cluster.environment))
    further: dict[str, Any] = {"requeue" if cluster.max_requeues else "no_requeue": True, "export": "ALL"}
    further |= {name: value for name, value in cluster.sbatch.items() if value is not False}
    if first and submission.after:
        further["dependency"] = "afterok:" + ":".join(submission.after)
    if not first or submission.after:
        further["kill_on_invalid_dep"] = "yes"
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        job_name_prefix=f"{submission.name}.",
        time=cluster.time,
        nodes=submission.nodes,
        ntasks_per_node=1,
        torchrun_nproc_per_node=cluster.processes_per_node,
        gpus_per_node=cluster.gpus_per_node,
        cpus_per_task=cluster.cpus_per_task,
        mem=cluster.memory,
        exclusive=True if cluster.exclusive else None,
        signal=f"USR1@{cluster.warning_seconds}" if cluster.warning_seconds else None,
        open_mode="append",
        container_image=cluster.container.image if cluster.container else None,
        container_mounts=list(cluster.container.mounts) if cluster.container else [],
        container_env=list(cluster.secrets) if cluster.container and cluster.secrets else None,
        additional_parameters=further,
        srun_args=_srun_arguments(cluster, submission.directory),
        env_vars=environment,
        setup_lines="\n".join(_setup_lines(cluster)),
        launcher=run.Torchrun(rdzv_backend="c10d", rdzv_port=cluster.rendezvous_port, rdzv_id=1),
        packager=run.Packager(),
        tunnel=run.LocalTunnel(job_dir=str(base / "experiments")),
        retries=0,
        poll_estimated_start_time=False,
    )


def _srun_arguments(cluster: SlurmConfig, directory: Path) -> list[str]:
    """Return the arguments between nemo-run's srun options and torchrun; they override nemo-run's options.

    The end of a node must not kill the others at once, because they may be about to end with the same exit code.
    """
    arguments = ["--kill-on-bad-exit=0", f"--wait={_SECONDS_FOR_OTHER_NODES}"]
    # srun does not inherit this from sbatch and would give the single task of a node one core.
    arguments.append(f"--cpus-per-task={cluster.cpus_per_task or '$SLURM_CPUS_ON_NODE'}")
    arguments += cluster.srun
    if cluster.container is not None and not cluster.container.mount_home:
        arguments.append("--no-container-mount-home")
    return [*arguments, "python", "-m", "vapo_mcore.launch.node", "--directory", str(directory)]


def _setup_lines(cluster: SlurmConfig) -> list[str]:
    lines = ["head_node_ip=${head_node_ip%% *}"]  # the first address if the node has several
    if cluster.path is not None:
        lines.append(f'export PATH={cluster.path}:"$PATH"')
    lines += cluster.setup
    if cluster.max_requeues:
        lines += [
            f"queue_again() {{  # exit code {EXIT_REQUEUE}: the run was asked to stop, has saved, and can be resumed",
            "    code=$?",
            f'    if [ "$code" -eq {EXIT_REQUEUE} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {cluster.max_requeues} ]; then',
            '        scontrol requeue "$SLURM_JOB_ID"',
            "    fi",
            "}",
            "trap queue_again EXIT",
        ]
    return lines


def _script(experiment: Any, name: str) -> str:
    return (Path(experiment._exp_dir) / f"{name}_sbatch.sh").read_text(encoding="utf-8")


def _job_ids(experiment: Any) -> dict[str, str]:
    """Extract Slurm's job ids from nemo-run's handles ``slurm_tunnel://SESSION/ID/...``."""
    return {job.id: job.handle.partition("://")[2].split("/")[1] for job in experiment.jobs if job.handle}


def _quietly(output: io.StringIO, action: Callable[[], None]) -> None:
    """Run ``action`` with its output captured and an empty stdin, which nemo-run's commands would otherwise consume."""
    stdin = sys.stdin
    with redirect_stdout(output), redirect_stderr(output), open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            action()
        finally:
            sys.stdin = stdin


def _reason(error: BaseException) -> str:
    """Return what sbatch wrote to stderr, else the message of nemo-run's error."""
    result = getattr(error, "result", None)
    text = (getattr(result, "stderr", "") or "").strip() or str(error).strip()
    return text or type(error).__name__


def _cancel(job_id: str) -> None:
    subprocess.run(["scancel", job_id], check=False, capture_output=True)
