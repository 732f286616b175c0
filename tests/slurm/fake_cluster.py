"""A real Slurm on this machine, for a test: munged, slurmctld and one slurmd a fake node, under one folder, ended by their process ids.

Each slurmd has its own host name and /etc/hosts, so that nodes' names resolve inside jobs as on a cluster. Processes are
tracked with cgroups where version 1's freezer is there, because that decides whom Slurm's warning signal reaches.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
_FREEZER = Path("/sys/fs/cgroup/freezer")


def installed() -> bool:
    return all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "sbatch"))


def install() -> None:
    """Debian's packages; for root."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)


class FakeCluster:
    """``nodes`` fake nodes of partition ``batch``, each said to have ``gpus``; ``with`` starts and ends them. Nodes are named after their
    ports, so that several clusters on a machine do not meet."""

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 0) -> None:
        self.folder = folder
        self._gpus = gpus
        self._port, *node_ports = _free_ports(1 + nodes)
        self._ports = {f"n{port}": port for port in node_ports}
        self.nodes = list(self._ports)
        self.configuration = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def __enter__(self) -> FakeCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, check: bool = True) -> str:
        """Output of one of Slurm's commands."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by name: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job_id)))

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s\n{self.run('squeue', '--long', check=False)}"
            time.sleep(0.25)

    def stop(self) -> None:
        """Cancel all jobs and end the daemons that this object started."""
        if len(self._daemons) > 1:
            self.run("scancel", "--partition=batch", check=False)
            deadline = time.monotonic() + 40
            while self.run("squeue", "--noheader", check=False).strip() and time.monotonic() < deadline:
                time.sleep(0.25)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []
        for node in self.nodes:
            _remove_group(_FREEZER / f"slurm_{node}")

    def _start(self) -> None:
        for name in ("state", "munge", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._write_configuration()
        options = [f"--{name}-file={self.folder}/munge/munged.{name}" for name in ("pid", "log", "seed")]
        self._daemon("munged", "--foreground", f"--key-file={key}", f"--socket={self.folder}/munge/munge.socket", *options)
        self.wait_for("munged", (self.folder / "munge" / "munge.socket").exists, 10)
        self._daemon("slurmctld", "-D", "-i")
        self.wait_for("slurmctld", lambda: "is UP" in self.run("scontrol", "ping", check=False), 20)
        hosts = self.folder / "hosts"
        addresses = "".join(f"127.0.0.{index + 2} {node}\n" for index, node in enumerate(self.nodes))
        hosts.write_text(f"127.0.0.1 localhost {_host()}\n{addresses}")
        for node in self.nodes:
            script = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'
            self._daemon("unshare", "--mount", "--uts", "bash", "-c", script, "_", node, str(hosts))
        self.wait_for("nodes", lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(self.nodes)), 30)

    def _daemon(self, *command: str) -> None:
        """Start a daemon in the foreground, which ends with this process, however that ends."""
        bound = ["setpriv", "--pdeathsig", "TERM", *command]
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(bound, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _write_configuration(self) -> None:
        with_cgroups = "cgroup /sys/fs/cgroup/freezer " in Path("/proc/mounts").read_text()
        if with_cgroups:
            text = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\nConstrainRAMSpace=no\n"
            (self.folder / "cgroup.conf").write_text(text)
        gres = f" Gres=gpu:{self._gpus}" if self._gpus else ""
        if self._gpus:
            for number in range(self._gpus):
                (self.folder / f"gpu{number}").touch()
            (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{self._gpus - 1}]\n")
        nodes = "".join(
            f"NodeName={node} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={self._ports[node]} CPUs=8 RealMemory=8000{gres}\n"
            for node in self.nodes
        )
        self.configuration.write_text(
            _CONFIGURATION.format(folder=self.folder, host=_host(), port=self._port, tracking="cgroup" if with_cgroups else "linuxproc")
            + ("GresTypes=gpu\n" if self._gpus else "")
            + nodes
            + "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _remove_group(group: Path) -> None:
    """End what is left of a node's jobs, and remove their cgroups."""
    for file in group.rglob("cgroup.procs"):
        for process in file.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    for path in sorted((group, *group.rglob("*")), reverse=True):
        if path.is_dir():
            with contextlib.suppress(OSError):  # a process of it is still ending: the next cluster's slurmd takes the group over
                path.rmdir()


def _host() -> str:
    return os.uname().nodename.split(".")[0]


_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again when its credential has expired, by default after two minutes.
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=10
MinJobAge=600
MailProg=/bin/true
"""
