"""Machine: the doctor's findings on each node, and plan's verdict on memory, for this recipe."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any, Literal

import torch

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.record import Measurement, fails, holds, not_applicable
from vapo_mcore.collectives import all_gather_objects, broadcast_object
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.doctor.machine import machine_findings
from vapo_mcore.doctor.report import Finding, merge, require_same_versions
from vapo_mcore.errors import VapoError
from vapo_mcore.planning.devices import DEVICES

IMPORT_SECONDS, PLAN_SECONDS = 120.0, 300.0
_VERDICTS: dict[str, Literal["holds", "warning", "fails"]] = {"ok": "holds", "warn": "warning", "FAIL": "fails"}


class PlanError(VapoError):
    """``vapo-mcore plan`` has no result for the recipe."""


def run(bench: Bench) -> list[Measurement]:
    """Run the doctor once per node. Rank 0 also runs ``plan``, in another process because it builds models on the meta device."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    planning = _start_plan(bench, processes) if bench.parallel.rank == 0 else not_applicable("plan", "rank 0 plans")
    mine = machine_findings(bench.config, processes, IMPORT_SECONDS) if first_of_node else None
    by_node: dict[str, list[Finding]] = {}
    for rank, (host, findings) in enumerate(all_gather_objects((socket.gethostname(), mine))):
        if findings is not None:
            by_node[host if host not in by_node else f"{host} (rank {rank})"] = findings
    found = [
        Measurement(f"doctor: {finding.check}{f', {where}' if where else ''}", _VERDICTS[finding.status], finding.detail)
        for finding, where in merge(require_same_versions(by_node))
    ]
    plan = planning if isinstance(planning, Measurement) else _planned(planning, processes)
    return [*found, broadcast_object(plan)]


def device_name() -> str | None:
    """Return this machine's device in plan's table, or None if the table lacks it."""
    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    return next((known for known in DEVICES if known in name), None)


def planned(bench: Bench, processes: int, device: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the output of ``vapo-mcore plan`` for this recipe with ``processes`` devices a node. No collective.

    Raises PlanError where it plans nothing.
    """
    return _result(_start(bench, processes, device))


def _start(bench: Bench, processes: int, device: str) -> subprocess.Popen[str]:
    """Start ``plan`` in its own process, because it builds models on the meta device."""
    recipe = bench.scratch / "recipe.yaml"
    recipe.write_text(dump_yaml(bench.config), encoding="utf-8")
    arguments = ["plan", str(recipe), "--gpus-per-node", str(processes), "--device", device, "--json"]
    if device == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        arguments += ["--rate", f"memory={memory}", "--rate", f"node_memory={memory}"]
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VAPO_MCORE_ERRORS")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    command = [sys.executable, "-W", "ignore", "-m", "vapo_mcore", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    bench.stack.callback(process.kill)
    return process


def _result(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    try:
        stdout, stderr = process.communicate(timeout=PLAN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise PlanError(f"not done after {PLAN_SECONDS:.0f} s") from None
    if not stdout.strip().startswith("{"):
        last = (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise PlanError(f"the recipe cannot be planned: {last}")
    return process.returncode, json.loads(stdout)


def _start_plan(bench: Bench, processes: int) -> subprocess.Popen[str] | Measurement:
    """Start ``plan``, or say why it does not apply."""
    device = device_name()
    if device is None:
        return not_applicable("plan", f"plan knows {', '.join(DEVICES)}, not {torch.cuda.get_device_name()}: give it this device's --rate")
    return _start(bench, processes, device)


def _planned(process: subprocess.Popen[str], processes: int) -> Measurement:
    what, tolerance = "plan", "every rank fits in every stage"
    try:
        code, plan = _result(process)
    except PlanError as error:
        return fails(what, str(error), tolerance, "run `vapo-mcore plan` on the recipe")
    device = device_name()
    if code != 0:
        shown = f"does not fit on {device}: {'; '.join(map(str, plan.get('misfits', []))) or 'see vapo-mcore plan'}"
        return fails(what, shown, tolerance, "`vapo-mcore plan` on the recipe names changes that make it fit")
    return holds(what, f"fits on {device}, {processes} a node", tolerance)
