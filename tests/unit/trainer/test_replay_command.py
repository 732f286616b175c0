"""The settings of a replay, and what is checked before it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.unit.config_helpers import load, write_base
from vapo_mcore.commands.replay import Comparison, write_json
from vapo_mcore.commands.replay_checks import ReplayOptions, check_replay
from vapo_mcore.commands.replay_command import _reset_derived
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import ParallelConfig
from vapo_mcore.errors import ConfigError


def test_another_layout_derives_anew_what_the_layout_of_the_run_gave(tmp_path: Path) -> None:
    write_base(tmp_path)
    tp2 = ("parallel.world_size=4", "parallel.tensor_model_parallel_size=2")

    def replayed(run: tuple[str, ...], *overrides: str) -> ParallelConfig:
        resolved = tmp_path / "config.yaml"
        resolved.write_text(dump_yaml(load(tmp_path, *run)))
        assert "data_parallel_size" in resolved.read_text()
        return load_config(resolved, [*_reset_derived(str(resolved), overrides), *overrides]).parallel

    def sizes(parallel: ParallelConfig) -> tuple[int, int, bool]:
        return parallel.world_size, parallel.data_parallel_size, parallel.sequence_parallel

    one = "parallel.tensor_model_parallel_size=1"
    assert sizes(replayed(("parallel.world_size=2",), "parallel.world_size=1")) == (1, 1, False)
    assert sizes(replayed(tp2, "parallel.world_size=1", one)) == (1, 1, False)
    assert sizes(replayed(tp2, "parallel={world_size: 2, tensor_model_parallel_size: 1, data_parallel_size: 2}")) == (2, 2, False)
    assert sizes(replayed(tp2, "parallel.world_size=2")) == (2, 1, True)
    assert sizes(replayed((*tp2, "parallel.sequence_parallel=false"), "parallel.world_size=2")) == (2, 1, False)  # a choice, not derived
    assert sizes(replayed(tp2, "parallel.world_size=2", "parallel.sequence_parallel=false")) == (2, 1, False)
    assert _reset_derived("not read", ["seed=2"]) == []


def test_another_layout_of_the_critic_derives_anew_what_its_own_gave(tmp_path: Path) -> None:
    write_base(tmp_path)
    resolved = tmp_path / "config.yaml"
    key = "critic.parallel.tensor_model_parallel_size"
    resolved.write_text(dump_yaml(load(tmp_path, "parallel.world_size=2", f"{key}=2")))
    for overrides, expected in (([f"{key}=1"], False), ([f"{key}=2"], True), (["critic.parallel={}"], True)):
        config = load_config(resolved, [*_reset_derived(str(resolved), overrides), *overrides])
        assert config.critic.parallel is not None and config.critic.parallel.sequence_parallel is expected
    alone = ["critic.parallel=null", "parallel.world_size=1"]
    config = load_config(resolved, [*_reset_derived(str(resolved), alone), *alone])
    assert config.critic.parallel is None and config.critic_parallel == config.parallel


def test_a_comparison_that_cannot_be_written_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    write_base(tmp_path)
    config = load(tmp_path)
    dump = tmp_path / "run" / "dumps" / "step_000003"
    dump.mkdir(parents=True)
    (dump / "step.json").touch()
    check_replay(config, ReplayOptions(3, json_path=str(tmp_path / "new.json")))
    assert not (tmp_path / "new.json").exists()
    for path, expected in (
        ("none/new.json", "the folder .*none' does not exist; create it first"),
        ("run", "it is a folder; give the path of a file"),
    ):
        with pytest.raises(ConfigError, match=f"--json .* cannot be written: {expected}"):
            check_replay(config, ReplayOptions(3, json_path=str(tmp_path / path)))


def test_the_written_comparison_is_json_where_a_number_is_not_finite(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    write_json(str(tmp_path / "new.json"), [Comparison("a", None, math.nan, True), Comparison("b", 0.5, -math.inf, True)], True)
    found = json.loads((tmp_path / "new.json").read_text(), parse_constant=refuse)
    assert found == {"exact": True, "metrics": {"a": {"recorded": None, "replayed": "nan"}, "b": {"recorded": 0.5, "replayed": "-inf"}}}
