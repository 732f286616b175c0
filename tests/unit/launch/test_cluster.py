"""Executor settings: every fault at once, no secret in a file, and a layout that fills the nodes."""

from pathlib import Path

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import load, write_base
from vapo_mcore.errors import ConfigError
from vapo_mcore.launch.cluster import check_layout, load_local, load_slurm

EXAMPLES = ROOT / "examples" / "configs" / "clusters"
MINIMAL = "account: a\npartition: p\ntime: '01:00:00'\nlogs: /tmp/logs\nprocesses_per_node: 2\n"


def _faults(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_slurm(path, overrides)
    head, *lines = str(caught.value).split("\n")
    assert head.startswith(f"executor settings {path}: ")
    return [line.strip() for line in lines]


def test_examples_are_valid() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
    assert names == ["local.yaml", "slurm_pyxis.yaml", "slurm_venv.yaml"]
    load_local(EXAMPLES / "local.yaml")
    assert load_slurm(EXAMPLES / "slurm_pyxis.yaml").container is not None
    assert load_slurm(EXAMPLES / "slurm_venv.yaml").path is not None


def test_missing_and_unknown_fields_are_all_told(tmp_path: Path) -> None:
    faults = _faults(tmp_path, "acount: x\ntime: 5 hours\nlogs: logs\ncontainer: {mounts: [a]}\n")
    for fault in (
        "account: is required",
        "partition: is required",
        "processes_per_node: is required",
        "container.image: is required",
        "acount: unknown key; did you mean 'account'?",
    ):
        assert fault in faults
    assert any(fault.startswith("time: '5 hours' is not a time limit") for fault in faults)
    assert any(fault.startswith("logs: 'logs' must be an absolute path") for fault in faults)
    assert any(fault.startswith("container.mounts.0: 'a' is not a mount") for fault in faults)
    assert len(faults) == 8


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("environment: {WANDB_API_KEY: value-of-it}", "environment: WANDB_API_KEY looks like a secret"),
        ("setup: ['export HF_TOKEN=value-of-it']", "setup.0: the line that sets HF_TOKEN would write a secret"),
        ("secrets: ['HF_TOKEN=value-of-it']", "secrets.0: "),
        ("environment: {http_proxy: x}", "environment: 'http_proxy' is not the name of an environment variable in capitals"),
        ("secrets: [VAPO_TEST_IS_NOT_SET]", "secrets: VAPO_TEST_IS_NOT_SET is not set in this environment"),
        ("gpus_per_node: 1", "gpus_per_node: 1 is less than processes_per_node = 2"),
        ("container: {image: x.sqsh, mounts: ['/data:/data']}", "logs: '/tmp/logs' is not inside any of container.mounts"),
        ("container: {image: x.sqsh, mounts: ['/tmp']}\npath: /venv/bin", "path: '/venv/bin' has no effect in a container"),
        ("sbatch: {nodes: 3}", "sbatch.nodes: is set by another key"),
        ("sbatch: {--qos: high}", "sbatch.--qos: is not the long name"),
        ("account: my account", "account: 'my account' must be one word"),
        ("extends: nowhere.yaml", "nowhere.yaml: no such configuration file"),
        *(
            (f"environment: {{{name}: value-of-it}}", f"environment: {name} looks like a secret")
            for name in ("HF_TOKEN", "GITHUB_PAT", "HF_KEY", "MY_PASS", "ACCESSTOKEN", "AWS_SECRET_ACCESS_KEY", "MYSQL_PWD", "SIGNING_KEYS")
        ),
        ("environment: {HTTP_PROXY: 'http://me:value-of-it@proxy:3128'}", "environment: HTTP_PROXY looks like a secret"),
        ("environment: {CACHE: 'redis://:value-of-it@host:6379'}", "environment: CACHE looks like a secret"),
        ("setup: ['git clone https://me:value-of-it@host/x']", "setup.0: the line would write a password into the script"),
        ('environment: {A: "a\\0b"}', "environment: A contains a zero byte"),
        ("environment: {HOME: x}\nsecrets: [HOME]", "secrets: HOME has a value under environment too"),
        ('sbatch: {comment: "a\\n#SBATCH --account=b"}', "must be one line of printable characters"),
        ("sbatch: {array: 1-3}", "sbatch.array: is not compatible with launch's jobs"),
        ("srun: ['--x={a,b}']", "srun.0: '--x={a,b}' must be one word without spaces and shell characters"),
        ("container: {image: 'x(1).sqsh', mounts: ['/tmp']}", "container.image: 'x(1).sqsh' must be one word"),
        ("logs: /tmp/%j", "logs: '/tmp/%j' contains %"),
        ("time: '00:60:00'", "time: '00:60:00' is not a time limit"),
        ("time: '00:00:00'", "time: '00:00:00' is not a time limit"),
        ("warning_seconds: 3600", "warning_seconds: 3600 is not less than time = '01:00:00'"),
    ],
)
def test_bad_values(text: str, fault: str, tmp_path: Path) -> None:
    minimal = "".join(line + "\n" for line in MINIMAL.splitlines() if line.partition(":")[0] != text.partition(":")[0])
    faults = _faults(tmp_path, minimal + text + "\n")
    assert len(faults) == 1
    assert fault in faults[0]
    assert "value-of-it" not in faults[0]


def test_names_that_only_look_like_secrets(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    names = ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "MONKEY", "PWD", "XAUTHORITY", "NO_PROXY")
    path.write_text(MINIMAL + "environment: {" + ", ".join(f"{name}: http://host:80/a@b" for name in names) + "}\n")
    assert tuple(load_slurm(path).environment) == names


def test_value_of_a_secret_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAPO_TEST_SECRET", "value-of-it")
    path = tmp_path / "cluster.yaml"
    path.write_text(MINIMAL + "secrets: [VAPO_TEST_SECRET]\n")
    assert "value-of-it" not in repr(load_slurm(path))


@pytest.mark.parametrize(
    ("world_size", "nodes", "expected"),
    [
        (8, "null", 4),
        (8, "4", 4),
        (
            6,
            "4",
            "parallel.world_size = 6 does not fit the cluster's nodes x processes_per_node = 4 x 2; set parallel.world_size=8, or nodes: 3",
        ),
        (5, "4", "set parallel.world_size=8"),
        (5, "null", "does not fit the cluster's processes_per_node = 2; set parallel.world_size a multiple of 2"),
        (1, "null", "does not fit"),
    ],
)
def test_processes_fill_the_nodes(world_size: int, nodes: str, expected: int | str, tmp_path: Path) -> None:
    write_base(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text(MINIMAL)
    config, cluster = load(tmp_path, f"parallel.world_size={world_size}"), load_slurm(path, [f"nodes={nodes}"])
    if isinstance(expected, int):
        assert check_layout(config, cluster, "/home/me") == expected
        return
    with pytest.raises(ConfigError) as caught:
        check_layout(config, cluster, "/home/me")
    assert expected in str(caught.value)


def test_the_container_sees_the_working_directory(tmp_path: Path) -> None:
    write_base(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text(MINIMAL + "container: {image: x.sqsh, mounts: ['/tmp:/tmp', '/home/me:/me', '/lustre:/lustre:ro']}\n")
    config, cluster = load(tmp_path, "parallel.world_size=2"), load_slurm(path)
    assert check_layout(config, cluster, "/lustre/project") == 1
    for directory in ("/home/me/project", "/lustre2/project", "/tmp/a b", "/tmp/a;b", "/tmp/$(a)", "/tmp/it's"):
        with pytest.raises(ConfigError, match="working directory"):
            check_layout(config, cluster, directory)
