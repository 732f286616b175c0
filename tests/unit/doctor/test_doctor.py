"""The findings about one node: each check sees both sides of its limit; the table and the exit code."""

from __future__ import annotations

import resource
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.unit.config_helpers import load, write_base
from vapo_mcore.cli import main
from vapo_mcore.doctor import machine
from vapo_mcore.doctor.report import Finding, exit_code, merge, require_same_versions, table

GIB = 2**30


@pytest.mark.parametrize(("statuses", "code"), [(["ok", "ok"], 0), (["ok", "warn"], 1), (["warn", "FAIL", "ok"], 2)])
def test_exit_code(statuses: list[str], code: int) -> None:
    assert exit_code(Finding("x", status, "") for status in statuses) == code  # type: ignore[arg-type]


def test_nodes_that_agree_share_a_row() -> None:
    same, low = Finding("versions", "ok", "torch 2.13"), Finding("host memory", "FAIL", "1 GiB free")
    high = Finding("host memory", "ok", "9 GiB free")
    rows = merge({"n0": [same, high], "n1": [same, low], "n2": [same, high]})
    assert rows == [(same, "all 3 nodes"), (high, "n0, n2"), (low, "n1")]
    lines = table(rows).splitlines()
    assert lines[0] == "versions     ok    all 3 nodes  torch 2.13"
    assert lines[2] == "host memory  FAIL  n1           1 GiB free"


def test_nodes_with_different_versions_are_a_fault() -> None:
    new, old = Finding("versions", "ok", "torch 2.13"), Finding("versions", "ok", "torch 2.9")
    memory = Finding("host memory", "ok", "9 GiB free")
    same = {"n0": [new, memory], "n1": [new, Finding("host memory", "ok", "8 GiB free")]}
    assert require_same_versions(same) == same
    answer = require_same_versions({"n0": [new, memory], "n1": [old, memory], "n2": [new, memory]})
    assert [findings[0].status for findings in answer.values()] == ["FAIL"] * 3
    assert [findings[1] for findings in answer.values()] == [memory] * 3
    assert answer["n1"][0].detail == "torch 2.9: not the same on all nodes"


def test_open_files_and_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, status in ((1024, "warn"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert machine.open_files().status == status
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert machine.locked_memory(cuda=True).status == "warn"
    assert machine.locked_memory(cuda=False).status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.locked_memory(cuda=True) == Finding("locked memory", "ok", "ulimit -l unlimited")


@pytest.mark.parametrize(
    ("architecture", "capability", "noted"),
    [("x86_64", "AVX2", True), ("x86_64", "DEFAULT", True), ("x86_64", "AVX512", False), ("aarch64", "DEFAULT", False)],
)
def test_cpus_without_avx512_are_slow_in_bfloat16(architecture: str, capability: str, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine.platform, "machine", lambda: architecture)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = machine.devices(1, cuda=False)
    assert found.status == "ok"
    assert ("model.dtype=float32" in found.detail) == noted


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory(str(tmp_path / "no")).status == "FAIL"
    usage = namedtuple("usage", "total used free")
    for free, status in ((64 * 2**20, "warn"), (GIB, "ok")):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, free=free: usage(free, 0, free))
        assert machine.shared_memory(str(tmp_path)).status == status


def test_imports_run_elsewhere_and_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vapo_test_hangs.py").write_text("import time; time.sleep(60)")
    (tmp_path / "vapo_test_dies.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "json")
    assert machine.import_finding("json", True, 30) == Finding("import json", "ok", "can be imported")
    assert machine.import_finding("pytest", True, 0.0) == Finding("import pytest", "ok", "imported by this process")
    assert machine.import_finding("vapo_test_hangs", False, 0.3) == Finding(
        "import vapo_test_hangs", "warn", "not done after 0 s (--seconds)"
    )
    assert machine.import_finding("vapo_test_dies", True, 30) == Finding(
        "import vapo_test_dies", "FAIL", "exit code 7, and the recipe needs it"
    )
    assert machine.import_finding("vapo_test_missing", True, 30).detail.startswith("ModuleNotFoundError")
    assert "vapo_test_dies" not in sys.modules


def test_host_memory_against_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vapo_mcore.planning.host_memory import host_bytes

    write_base(tmp_path)
    for setting in ("model.offload=true", "model.offload=null"):  # on CPUs nothing is offloaded by default
        config = load(tmp_path, "parallel.world_size=2", setting)
        needed = host_bytes(config, processes=2, cuda=False).total
        assert needed > 2**20
        for free, status in ((needed - 1, "FAIL"), (needed, "warn"), (2 * needed, "ok")):
            monkeypatch.setattr(machine, "available_host_bytes", lambda free=free: free)
            assert machine.host_memory(config, 2, cuda=False).status == status
    config = load(tmp_path, "parallel.world_size=2", "policy.optimizer.cpu_offload=true")  # on CPUs too
    assert host_bytes(config, processes=2, cuda=False).offloaded > 2**20


def test_missing_inputs(tmp_path: Path) -> None:
    config = load(tmp_path) if write_base(tmp_path) else None
    assert config is not None
    assert machine.paths(config)[0].status == "ok"
    (tmp_path / "train.jsonl").unlink()
    (finding,) = machine.paths(config)
    assert (finding.status, finding.detail) == ("FAIL", f"not visible from this node: data.train.0.path = {tmp_path}/train.jsonl")


def test_command_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "imports", lambda *_: [Finding("import vllm", "warn", "missing")])
    base = str(write_base(tmp_path))
    assert main(["doctor", base, "parallel.world_size=4"]) == 1
    assert main(["doctor", "--accept-warnings"]) == 0
    output = capsys.readouterr().out
    assert "one process of the recipe's 4" in output
    assert main(["doctor", base, "model.path=/no/where"]) == 2
    assert "model.path = /no/where" in capsys.readouterr().out
    assert main(["doctor", base, "run.dir=/proc/vapo"]) == 2
    assert "run folder     FAIL  run.dir = '/proc/vapo' cannot be written: /proc" in capsys.readouterr().out
    assert main(["doctor", base, "nonsense=1"]) == 2
    assert main(["doctor", base, "--seconds", "0"]) == 2
