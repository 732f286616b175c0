"""Command line of ``vapo-mcore launch``: start a run on this machine or on Slurm. Importing it imports no third-party package."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.errors import ConfigError, VapoError
from vapo_mcore.launch import STAGES

if TYPE_CHECKING:
    from vapo_mcore.launch.cluster import Cluster, LocalConfig, SlurmConfig
    from vapo_mcore.launch.stages import StageJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser; FILE and KEY=VALUE are common to all commands."""
    parser.add_argument("--executor", choices=("local", "slurm"), required=True, help="where the processes run")
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="YAML settings of the executor (required for slurm)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of --cluster; repeatable")
    parser.add_argument("--stages", default="train", metavar="A,B", help=f"jobs to run one after the other: {', '.join(STAGES)} (train)")
    parser.add_argument("--after", default="", metavar="ID,ID", help="Slurm jobs that must succeed before the first job starts")
    parser.add_argument("--name", metavar="NAME", help="name of the jobs (default: the name of FILE)")
    parser.add_argument("--dry-run", action="store_true", help="print the scripts only; works on any machine")


def run(options: argparse.Namespace) -> int:
    """Check everything, then submit or start the jobs. Returns the exit code; raises ConfigError with all faults."""
    from vapo_mcore.launch.cluster import SlurmConfig
    from vapo_mcore.launch.stages import stage_jobs

    jobs, cluster = _together(
        lambda: stage_jobs(options.file, options.overrides, _stages(options.stages), check_paths=not options.dry_run),
        lambda: _load_cluster(options),
    )
    name = options.name or Path(options.file).stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(_[A-Za-z0-9.-]+)*", name):
        raise ConfigError(f"--name {name!r} must consist of letters, digits, '.', '-' and '_', with a letter or digit first")
    directory = Path(os.environ.get("PWD", ""))  # not resolved: the nodes may mount the file system through a symbolic link
    if not directory.is_absolute() or not directory.is_dir() or not directory.samefile(Path.cwd()):
        directory = Path.cwd()
    if isinstance(cluster, SlurmConfig):
        return _slurm(options, name, jobs, cluster, directory)
    return _local(options, name, jobs, cluster, directory)


def _slurm(options: argparse.Namespace, name: str, jobs: list[StageJob], cluster: SlurmConfig, directory: Path) -> int:
    from vapo_mcore.launch import nemo
    from vapo_mcore.launch.checks import check_folder_writable, check_jobs_are_known, check_scripts, check_slurm
    from vapo_mcore.launch.cluster import check_layout

    after = options.after.split(",") if options.after else []
    wrong = [job_id for job_id in after if not re.fullmatch(r"[1-9][0-9]*", job_id)]
    if wrong:
        raise ConfigError(f"--after: {', '.join(map(repr, wrong))} is not the id of a Slurm job")
    nodes = check_layout(jobs[0].config, cluster, str(directory))
    submission = nemo.Submission(name, jobs, cluster, nodes, directory, Path(cluster.logs), after)
    if not options.dry_run:
        check_slurm(cluster)
        _together(
            lambda: _check_run_folders(jobs),
            lambda: check_folder_writable("logs", submission.logs),
            lambda: check_jobs_are_known(after),
        )
    scripts = nemo.render(submission)
    if options.dry_run:
        for job, script in scripts.items():
            print(f"# --- {job}{_follows(jobs, job)}\n{script.rstrip()}", flush=True)
        return 0
    check_scripts(scripts)
    for job, job_id in nemo.submit(submission).items():
        print(f"{job}: job {job_id}{_follows(jobs, job)}", flush=True)
    print(f"logs: {submission.logs}/experiments/{name}", flush=True)
    return 0


def _local(options: argparse.Namespace, name: str, jobs: list[StageJob], cluster: LocalConfig, directory: Path) -> int:
    from vapo_mcore.launch import nemo
    from vapo_mcore.launch.checks import check_folder_writable

    if options.after:
        raise ConfigError("--after names Slurm jobs and has no meaning with --executor local")
    logs = Path(cluster.logs) if cluster.logs else Path(f"{jobs[-1].config.run.dir.rstrip('/')}.logs").absolute()
    _check_local_paths(jobs, logs)
    if options.dry_run:
        for job in jobs:
            world = job.config.parallel.world_size
            print(
                f"{job.name}: torchrun with {world} process{'' if world == 1 else 'es'}: vapo-mcore {' '.join(job.arguments(Path('FILE')))}"
            )
        return 0
    _together(lambda: _check_run_folders(jobs), lambda: check_folder_writable("logs", logs))
    return nemo.run_here(nemo.Submission(name, jobs, cluster, 1, directory, logs))


def _check_local_paths(jobs: list[StageJob], logs: Path) -> None:
    """Reject arguments that need quoting: nemo-run quotes them as for a shell, but starts local commands without one."""
    words = dict.fromkeys(word for job in jobs for word in job.arguments(logs) if shlex.quote(word) != word)
    if words:
        raise ConfigError(
            f"--executor local: {', '.join(map(repr, words))}: nemo-run does not support paths with spaces, shell characters or non-ASCII "
            "letters here; change them (--set logs=/...; run.dir for stage eval), or use vapo-mcore train"
        )


def _load_cluster(options: argparse.Namespace) -> Cluster:
    from vapo_mcore.launch.cluster import load_local, load_slurm

    if options.executor == "local":
        return load_local(options.cluster, options.set)
    if options.cluster is None:
        raise ConfigError("--executor slurm requires --cluster FILE: examples are in examples/configs/clusters")
    return load_slurm(options.cluster, options.set)


def _stages(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise ConfigError(f"--stages: {', '.join(map(repr, unknown))} must be one of {', '.join(STAGES)}")
    return names


def _check_run_folders(jobs: list[StageJob]) -> None:
    from vapo_mcore.launch.checks import check_folder_writable

    for job in jobs:
        if job.command == "train":
            check_folder_writable(f"{job.name}: run.dir", Path(job.config.run.dir))


def _follows(jobs: list[StageJob], name: str) -> str:
    names = [job.name for job in jobs]
    position = names.index(name)
    return f" (starts when {names[position - 1]} has succeeded)" if position else ""


def _together(*actions: Callable[[], object]) -> list:
    """Run all actions and return their results, or raise one ConfigError with the faults of all."""
    results, faults = [], []
    for action in actions:
        try:
            results.append(action())
        except VapoError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return results
