"""Host memory for offloading: what the machine has, by hand-made files, and the refusal before a model loads."""

import shutil
from pathlib import Path

import pytest

from tests.unit.config_helpers import write_base
from vapo_mcore.cli import main
from vapo_mcore.config import load_config
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.errors import ConfigError
from vapo_mcore.planning import host_memory
from vapo_mcore.planning.host_memory import available_host_bytes, check_host_memory, host_bytes
from vapo_mcore.planning.state import offload_host_bytes, snapshot_host_bytes


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   500 kB\n", "proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, used: int, cache: int, *, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": str(used), f"{folder}/memory.stat": f"anon 1\ninactive_file {cache}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 500 * 1024),
        ("0::/job/step\n", group("sys/fs/cgroup/job/step", "max", 7, 0) | group("sys/fs/cgroup/job", "9000", 4000, 1500), 6500),
        ("4:memory:/job\n", group("sys/fs/cgroup/memory/job", "3000", 2500, 0, version=1), 500),
        ("4:memory:/hidden\n", group("sys/fs/cgroup/memory", "3000", 3500, 0, version=1), 0),
        ("0::/job\n", group("sys/fs/cgroup/job", str(2**60), 4000, 0), 500 * 1024),
    ],
)
def test_available_memory_is_what_the_control_groups_leave(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    assert available_host_bytes(machine(tmp_path, groups, files)) == expected


def test_this_machine_has_some() -> None:
    assert 2**20 < available_host_bytes() < 2**50


def test_one_byte_too_few_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = load_config(write_base(tmp_path), ["model.offload=true"])
    architecture = read_architecture(config.model.path)
    needed = offload_host_bytes(config, architecture) + snapshot_host_bytes(config, architecture)
    check_host_memory(config, processes=1, cuda=False, available=needed)
    with pytest.raises(
        ConfigError,
        match=r"the policy and the critic, offloading takes \S+ GiB and the copy that checkpoints are written from takes \S+ GiB for",
    ) as refusal:
        check_host_memory(config, processes=1, cuda=False, available=needed - 1)
    assert "model.offload: false" in str(refusal.value)


def test_without_offload_a_checkpoint_still_needs_its_copy(tmp_path: Path) -> None:
    path = write_base(tmp_path)
    config = load_config(path)
    copy = snapshot_host_bytes(config, read_architecture(config.model.path))
    for settings, cuda in ((["model.offload=false"], True), ([], False)):
        check_host_memory(load_config(path, settings), processes=1, cuda=cuda, available=copy)
        with pytest.raises(ConfigError, match=r"critic, the copy that checkpoints are written from takes") as refusal:
            check_host_memory(load_config(path, settings), processes=1, cuda=cuda, available=copy - 1)
        assert "model.offload" not in str(refusal.value)
    with pytest.raises(ConfigError, match="offloading takes"):
        check_host_memory(config, processes=1, cuda=True, available=copy)


def test_a_critic_of_another_run_s_checkpoint_is_found(tmp_path: Path) -> None:
    config = load_config(write_base(tmp_path))
    checkpoint = tmp_path / "step_000001"
    (checkpoint / "critic" / "weights" / "hf").mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    shutil.copy(Path(config.model.path) / "config.json", checkpoint / "critic" / "weights" / "hf")
    continued = config.model_copy(update={"critic": config.critic.model_copy(update={"init": "saved", "path": checkpoint})})
    assert host_bytes(continued, processes=2, cuda=True) == host_bytes(config, processes=2, cuda=True)


def test_optimizers_on_the_cpu_need_it_without_offload_too(tmp_path: Path) -> None:
    config = load_config(write_base(tmp_path), ["model.offload=false", "critic.optimizer.cpu_offload=true"])
    needed = host_bytes(config, processes=1, cuda=True)
    assert needed.offloaded == offload_host_bytes(config, read_architecture(config.model.path), models_move=False) > 0
    check_host_memory(config, processes=1, cuda=True, available=needed.total)
    with pytest.raises(ConfigError, match=r"offloading takes \S+ GiB .* or set critic.optimizer.cpu_offload: false, if the devices"):
        check_host_memory(config, processes=1, cuda=True, available=needed.total - 1)


def test_train_refuses_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1000)
    assert main(["train", "--dry-run", str(write_base(tmp_path)), "model.offload=true"]) == 2
    assert "0.00 GiB are available" in capsys.readouterr().err
