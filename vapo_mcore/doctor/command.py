"""``vapo-mcore doctor [FILE]``: print one table and return an exit code, as a single process or as a rank under torchrun."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.doctor.report import Finding, exit_code, merge, require_same_versions, table
from vapo_mcore.errors import ConfigError

if TYPE_CHECKING:
    from vapo_mcore.config import Config

_PATIENCE = 6
"""Maximum number of imports, each of up to ``--seconds``, that the other nodes wait for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="recipe to check against (YAML configuration)")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings that replace those of FILE")
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="N", help="limit of each import and of each exchange between ranks (120)"
    )
    parser.add_argument("--accept-warnings", action="store_true", help="exit code 0 if there are only warnings")


def run(options: argparse.Namespace) -> int:
    """Print the findings; returns 0 if all checks pass, 1 for warnings, 2 if something that a run needs is missing."""
    if options.seconds <= 0:
        raise ConfigError(f"--seconds {options.seconds:g} must be > 0")
    from vapo_mcore.config import load_config

    config = load_config(options.file, options.overrides, check_paths=False) if options.file else None
    from vapo_mcore.launch.local import hand_exit_code, under_torchrun

    code = _with_ranks(config, options.seconds) if under_torchrun() else _alone(config, options.seconds)
    code = 0 if code == 1 and options.accept_warnings else code
    return hand_exit_code(code) if under_torchrun() else code


def _alone(config: Config | None, seconds: float) -> int:
    from vapo_mcore.doctor.machine import machine_findings, run_folder

    findings = machine_findings(config, 1, seconds)
    if config is not None:
        findings.append(run_folder(config))
    asked = f" of the recipe's {config.parallel.world_size}" if config is not None else ""
    findings.append(Finding("ranks", "ok", f"one process{asked}, so no connection was tried: torchrun or launch --stages doctor does that"))
    print(table(merge({socket.gethostname(): findings})), flush=True)
    return exit_code(findings)


def _with_ranks(config: Config | None, seconds: float) -> int:
    """Check every node and all ranks together; rank 0 prints the findings. Returns the same exit code on all ranks."""
    import torch.distributed as dist

    from vapo_mcore.doctor import network
    from vapo_mcore.doctor.machine import machine_findings

    rank, first_of_node = int(os.environ["RANK"]), os.environ["LOCAL_RANK"] == "0"
    host = socket.gethostname()
    fault = network.connect(seconds)
    if fault is not None:
        print(table([(fault, host)]), file=sys.stderr, flush=True)
        return 2
    with _Limit(_PATIENCE * seconds, f"{host}: the ranks did not finish their exchange; one of them hangs"):
        # One rank per node checks the node and imports packages, which takes longer than the other exchanges.
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE * seconds))
        mine = machine_findings(config, int(os.environ["LOCAL_WORLD_SIZE"]), seconds) if first_of_node else None
        by_node: dict[str, list[Finding]] = {}
        for other, (name, findings) in enumerate(network.gather((host, mine), patient)):
            if findings is not None:
                by_node[name if name not in by_node else f"{name} (rank {other})"] = findings
        together = [_world(config), network.clocks(), network.shared_folder(Path(config.run.dir if config is not None else "."))]
        together.append(network.all_reduce(seconds))
        answers = network.gather(together)
    rows = merge(require_same_versions(by_node))
    for same_check in zip(*answers, strict=True):  # the worst finding of all ranks counts
        worst = max(same_check, key=lambda finding: ("ok", "warn", "FAIL").index(finding.status))
        rows.append((worst, ""))
    if rank == 0:
        print(table(rows), flush=True)
    dist.destroy_process_group()
    return exit_code(finding for finding, _ in rows)


def _world(config: Config | None) -> Finding:
    world, nodes = int(os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    detail = f"{world} on {nodes} node{'' if nodes == 1 else 's'}"
    if config is not None and config.parallel.world_size != world:
        return Finding("ranks", "FAIL", f"{detail}, but the recipe has parallel.world_size = {config.parallel.world_size}")
    return Finding("ranks", "ok", detail)


class _Limit:
    """Ends this process with exit code 2 and a message if its block takes longer than ``seconds``: a hang is a finding too."""

    def __init__(self, seconds: float, message: str) -> None:
        self._timer = threading.Timer(seconds, self._end, [message])
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @staticmethod
    def _end(message: str) -> None:
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)
