"""Checks before submission: Slurm's commands, the container runtime, folders, and ``sbatch --test-only``."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vapo_mcore.errors import ConfigError
from vapo_mcore.launch.cluster import SlurmConfig

_SECONDS = 60.0


def check_slurm(cluster: SlurmConfig) -> None:
    """Raise ConfigError if this machine cannot submit to Slurm, or a container is configured that Slurm cannot run."""
    missing = [name for name in ("sbatch", "srun", "scontrol", "scancel") if shutil.which(name) is None]
    if missing:
        raise ConfigError(f"--executor slurm: {', '.join(missing)} not found in PATH; run launch on a login node")
    if cluster.container is not None and "--container-image" not in _output(["srun", "--help"]):
        raise ConfigError(
            f"container.image = {cluster.container.image!r}, but srun has no option --container-image here: the container runtime"
            " (the pyxis plugin with enroot) is not installed; install it, or remove container and set path to an environment"
        )


def check_jobs_are_known(job_ids: Sequence[str]) -> None:
    """Raise ConfigError naming jobs unknown to Slurm, which would start dependent jobs immediately."""
    unknown = [job_id for job_id in job_ids if _run(["scontrol", "show", "job", job_id]).returncode != 0]
    if unknown:
        raise ConfigError(
            f"--after: Slurm has no job {', '.join(unknown)} (never submitted, or no longer in its records), so the new jobs would not"
            " wait; omit jobs that have succeeded"
        )


def check_folder_writable(name: str, folder: Path) -> None:
    """Raise ConfigError unless ``folder`` can be created and written. Leaves nothing behind."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(20, "is not a directory", str(existing))
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"{name} = {str(folder)!r} cannot be written: {existing}: {error.strerror}") from error


def check_scripts(scripts: Mapping[str, str]) -> None:
    """Validate the scripts with ``sbatch --test-only``. Raises ConfigError with Slurm's message."""
    for name, text in scripts.items():
        # Remove the dependency: that job does not exist yet, or the test would wait for it.
        script = "\n".join(line for line in text.splitlines() if not line.startswith("#SBATCH --dependency"))
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch", encoding="utf-8") as file:
            file.write(script)
            file.flush()
            result = _run(["sbatch", "--test-only", file.name])
        if result.returncode != 0:
            words = "\n".join(f"  {line}" for line in (result.stderr + result.stdout).strip().splitlines())
            raise ConfigError(f"Slurm rejects job {name}; nothing was submitted. Its message:\n{words}")


def _output(command: list[str]) -> str:
    result = _run(command)
    return result.stdout + result.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env={**os.environ, "LC_ALL": "C"})
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{' '.join(command[:2])} did not answer within {_SECONDS:.0f} s; is Slurm running?") from error
