"""Executor settings (Slurm or local), kept in a YAML file separate from the recipe.

``load_slurm`` and ``load_local`` read a file such as those in ``examples/configs/clusters/`` (``extends:`` works as in recipes);
``check_layout`` checks it against the recipe. Secrets are given as names of environment variables; their values are never read or
written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from vapo_mcore.config.layers import Fault, Tree, apply_overrides, nested, read_layers
from vapo_mcore.config.loading import translate
from vapo_mcore.config.schema import Config, Section
from vapo_mcore.config.schema.base import NonNegativeInt, PositiveInt, possible_path
from vapo_mcore.config.yaml_text import shown
from vapo_mcore.errors import ConfigError

# Matches names of secrets: certain words anywhere (except TOKENIZER and numbers of TOKENS), or whole parts between underscores.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ|S(_|$))|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|CREDENTIAL|AUTHORIZATION|_PWD(_|$)"
    r"|(^|_)(KEYS?|PASS|PAT|AUTH|BEARER)(_|$)",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_ASSIGNMENT = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=")
# nemo-run does not quote srun's arguments, so they must not contain anything that a shell would interpret.
_SHELL_CHARACTERS = re.compile(r"[\s\"'$`\\;&|<>()*?\[\]{}!~\0]|^#")


def _time_limit(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d", text) or _seconds(text) == 0:
        raise ValueError(f"{text!r} is not a time limit such as '04:00:00' or '2-00:00:00'")
    return text


def _seconds(time_limit: str) -> int:
    days, _, clock = time_limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _one_word(text: str) -> str:
    if not text or _SHELL_CHARACTERS.search(text):
        raise ValueError(f"{shown(text)} must be one word without spaces and shell characters")
    return text


def _absolute(text: str) -> str:
    possible_path(text)
    if not text.startswith("/"):
        raise ValueError(f"{shown(text)} must be an absolute path: the nodes do not share a working directory")
    if "%" in text:
        raise ValueError(f"{shown(text)} contains %, which Slurm expands in the names of logs")
    return _one_word(text)


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        name, assigned, _ = name.partition("=")  # do not show the value
        name += assigned and "=..."
        raise ValueError(f"{shown(name)} is not the name of an environment variable in capitals")
    return name


def _not_secret(environment: dict[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        _variable(name)
        if "\0" in value:
            raise ValueError(f"{name} contains a zero byte, which environment variables cannot hold")
        if _SECRET_NAME.search(name) or _PASSWORD_IN_ADDRESS.search(value):
            raise ValueError(f"{name} looks like a secret, and values given here are written into scripts; list the name under secrets")
    return environment


def _of_one_line(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    for name, value in options.items():
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{name}: {shown(value)} must be one line of printable characters, because it becomes a line of the script")
    return options


def _mount(text: str) -> str:
    _one_word(text)
    if not re.fullmatch(r"/[^:,]*(:/[^:,]*(:[a-z+]+)?)?", text):
        raise ValueError(f"{shown(text)} is not a mount such as /lustre:/lustre or /data:/data:ro")
    return text


def _setup_line(text: str) -> str:
    for name in _ASSIGNMENT.findall(text):
        if _SECRET_NAME.search(name):
            raise ValueError(f"the line that sets {name} would write a secret into the script; list the name under secrets")
    if _PASSWORD_IN_ADDRESS.search(text):
        raise ValueError("the line would write a password into the script; put the address in a variable listed under secrets")
    return text


Word = Annotated[str, AfterValidator(_one_word)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Variable = Annotated[str, AfterValidator(_variable)]
Environment = Annotated[dict[str, str], AfterValidator(_not_secret)]
Options = Annotated[dict[str, str | int | bool], AfterValidator(_of_one_line)]
Words = Annotated[tuple[Word, ...], Field(strict=False)]


class ContainerConfig(Section):
    """Container settings, for Slurm with pyxis/enroot."""

    image: Word  # what srun --container-image takes: a .sqsh file or registry#image:tag
    mounts: Annotated[tuple[Annotated[str, AfterValidator(_mount)], ...], Field(strict=False)] = ()  # HOST:CONTAINER[:FLAGS]
    mount_home: bool = False  # the user's home folder inside the container


class SlurmConfig(Section):
    """Settings of ``--executor slurm``."""

    account: Word  # --account
    partition: Word  # --partition
    time: Annotated[str, AfterValidator(_time_limit)]  # --time, limit of each start of the job; a requeued job gets it again
    logs: AbsolutePath  # folder that all nodes see: scripts, logs and the resolved configuration of each job
    nodes: PositiveInt | None = None  # null: parallel.world_size / processes_per_node
    processes_per_node: PositiveInt  # processes that torchrun starts on each node, one per GPU
    gpus_per_node: NonNegativeInt | None = None  # --gpus-per-node; null: not requested, for clusters without GPUs or GRES
    cpus_per_task: PositiveInt | None = None  # cores of the only task on a node, for sbatch and srun
    memory: Word | None = None  # --mem, memory per node; "0": all of it
    exclusive: bool = False  # --exclusive
    # Further sbatch options by name, with _ for -: qos, reservation, ...; true: an option without a value, false: omit it.
    sbatch: Options = Field(default_factory=dict)
    srun: Words = ()  # further options of srun
    container: ContainerConfig | None = None
    path: AbsolutePath | None = None  # without a container: bin folder of the environment, prepended to PATH
    setup: Annotated[tuple[Annotated[str, AfterValidator(_setup_line)], ...], Field(strict=False)] = ()  # lines of shell before the start
    environment: Environment = Field(default_factory=dict)
    secrets: Annotated[tuple[Variable, ...], Field(strict=False)] = ()  # names of variables whose values the job inherits
    warning_seconds: NonNegativeInt = 300  # send SIGUSR1 so long before the time limit; the run saves and is requeued; 0: never
    max_requeues: NonNegativeInt = 100  # maximum number of requeues of a stopped or failed job
    rendezvous_port: Annotated[int, Field(ge=1024, le=65535)] = 29500  # must be free on the job's first node


class LocalConfig(Section):
    """Settings of ``--executor local``, which runs all processes on this machine."""

    logs: AbsolutePath | None = None  # null: <run.dir>.logs
    environment: Environment = Field(default_factory=dict)
    secrets: Annotated[tuple[Variable, ...], Field(strict=False)] = ()  # names of variables that must be set


Cluster = SlurmConfig | LocalConfig
_Model = TypeVar("_Model", SlurmConfig, LocalConfig)


def load_slurm(path: str | Path, overrides: Iterable[str] = ()) -> SlurmConfig:
    """Load and validate a file of Slurm settings. Raises ConfigError with every fault."""
    return _load(SlurmConfig, path, overrides)


def load_local(path: str | Path | None, overrides: Iterable[str] = ()) -> LocalConfig:
    """Load and validate a file of local settings, or return the defaults without one. Raises ConfigError with every fault."""
    return _load(LocalConfig, path, overrides)


def _load(kind: type[_Model], path: str | Path | None, overrides: Iterable[str]) -> _Model:
    faults: list[Fault] = []
    tree: Tree = {}
    layers, complete = 0, True
    if path is not None:
        tree, layers, complete = read_layers(Path(path), faults)
    apply_overrides(tree, overrides, layers, faults)
    settings = None
    if complete:
        try:
            settings = kind.model_validate(nested(tree))
        except ValidationError as error:
            faults += translate(error, kind)[0]
    if isinstance(settings, SlurmConfig):
        faults += _slurm_faults(settings)
    if settings is not None:
        faults += [
            Fault("secrets", f"{name} is not set in this environment, so the job could not inherit it")
            for name in settings.secrets
            if not os.environ.get(name)
        ]
    if faults or settings is None:
        what = "executor settings" if path is None else f"executor settings {path}"
        raise ConfigError(f"{what}: {len(faults)} fault{'' if len(faults) == 1 else 's'}\n" + "\n".join(f"  {fault}" for fault in faults))
    return settings


_TAKEN = {"account", "partition", "time", "nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "mem", "exclusive", "signal"}
_TAKEN |= {"output", "error", "job_name", "open_mode", "requeue", "dependency", "export", "kill_on_invalid_dep"}
_SENSELESS = {"array", "wrap", "test_only", "parsable", "quiet", "wait", "help", "usage", "version", "no_requeue", "ntasks", "input"}
_SENSELESS |= {"chdir", "export_file", "ntasks_per_core", "ntasks_per_socket", "ntasks_per_gpu"}


def _slurm_faults(settings: SlurmConfig) -> list[Fault]:
    """Check rules that involve several keys."""
    faults = []
    if settings.container is not None and settings.path is not None:
        faults.append(Fault("path", f"{settings.path!r} has no effect in a container, whose image has its own PATH; remove one of the two"))
    if settings.gpus_per_node is not None and settings.gpus_per_node < settings.processes_per_node:
        faults.append(
            Fault(
                "gpus_per_node", f"{settings.gpus_per_node} is less than processes_per_node = {settings.processes_per_node}: one GPU each"
            )
        )
    if settings.container is not None and _mounted(settings.logs, settings.container) is None:
        faults.append(Fault("logs", f"{settings.logs!r} is not inside any of container.mounts at its own path; mount it as HOST:HOST"))
    if settings.warning_seconds >= _seconds(settings.time):
        faults.append(
            Fault(
                "warning_seconds",
                f"{settings.warning_seconds} is not less than time = {settings.time!r}: each run of the job would be stopped at its start",
            )
        )
    faults += [Fault("secrets", f"{name} has a value under environment too") for name in settings.secrets if name in settings.environment]
    for name in settings.sbatch:
        if name in _TAKEN:
            faults.append(Fault(f"sbatch.{name}", "is set by another key or by launch itself"))
        elif name in _SENSELESS:
            faults.append(Fault(f"sbatch.{name}", "is not compatible with launch's jobs (one torchrun per node)"))
        elif not re.fullmatch(r"[a-z]+(_[a-z]+)*", name):
            faults.append(Fault(f"sbatch.{name}", "is not the long name of an sbatch option with _ for -"))
    return faults


def _mounted(path: str, container: ContainerConfig) -> str | None:
    """Return the mount that makes ``path`` visible in the container at the same path, or None."""
    for mount in container.mounts:
        host, inside = (mount.split(":") * 2)[:2]
        if host == inside and (path == host or path.startswith(host.rstrip("/") + "/")):
            return mount
    return None


def check_layout(config: Config, cluster: SlurmConfig, directory: str) -> int:
    """Return the number of nodes. Raises ConfigError if the processes do not fill them or the container lacks ``directory``."""
    faults = []
    world, per_node = config.parallel.world_size, cluster.processes_per_node
    nodes = cluster.nodes if cluster.nodes is not None else world // per_node
    if nodes * per_node != world:
        if cluster.nodes is None:
            right = f"parallel.world_size a multiple of {per_node}"
        else:
            right = f"parallel.world_size={nodes * per_node}, or nodes: {world // per_node}" if world % per_node == 0 else ""
            right = right or f"parallel.world_size={nodes * per_node}"
        given = f"nodes x processes_per_node = {nodes} x {per_node}" if cluster.nodes is not None else f"processes_per_node = {per_node}"
        faults.append(f"parallel.world_size = {world} does not fit the cluster's {given}; set {right}")
    if _SHELL_CHARACTERS.search(directory):
        faults.append(f"the working directory {directory!r} has spaces or shell characters, which nemo-run does not quote; use another")
    elif cluster.container is not None and _mounted(directory, cluster.container) is None:
        faults.append(f"the working directory {directory} is not inside any of container.mounts at its own path; mount it as HOST:HOST")
    if faults:
        raise ConfigError("\n".join(faults))
    return nodes
