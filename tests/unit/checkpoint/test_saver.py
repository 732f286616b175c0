"""The whole of a checkpoint in a world of one: published, chosen, loaded; and one that an earlier version of the package has written."""

from __future__ import annotations

import builtins
import errno
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.torchrun import ROOT
from tests.unit.checkpoint.conftest import contents, update
from tests.unit.checkpoint.fixture import SHAPE, STATE, fingerprints, make_models, save
from tests.unit.config_helpers import load, write_base, write_model
from vapo_mcore import checkpoint_files as files
from vapo_mcore.checkpoint import saver as saver_module
from vapo_mcore.checkpoint import strategies
from vapo_mcore.checkpoint.resume import _require_loadable, choose, load_models, load_state, restore_random
from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.checkpoint_files import Manifest
from vapo_mcore.config import Config
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.roles import Models
from vapo_mcore.planning.state import Role, snapshot_bytes
from vapo_mcore.weights.distcp import COMMON_NAME, METADATA_NAME, DistributedCheckpointReader

DTYPES: tuple[tuple[Role, str], ...] = (("policy", "bfloat16"), ("critic", "float32"))
KEPT = ROOT / "tests" / "cases" / "checkpoint"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_base(tmp_path)
    write_model(tmp_path / "model", **SHAPE)
    return load(tmp_path, "critic.value_pretraining.steps=0", "checkpoint.keep_last=2")


def loaded(run_dir: Path, name: str, config: Config, tmp_path: Path, parallel: ParallelContext) -> tuple[Models, Any]:
    checkpoint = choose(str(run_dir), name, print)
    assert checkpoint is not None
    models = make_models(tmp_path, parallel, seed=50)
    load_models(config, models, checkpoint)
    restore_random(checkpoint, 0)
    return models, load_state(checkpoint)


@pytest.mark.parametrize("name", ["step_000006", "step_000007"])
def test_a_checkpoint_of_an_earlier_version_loads(name: str, config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    """tests/cases/checkpoint is never written again: it is what users of 0.1 have."""
    models, state = loaded(KEPT, name, config, tmp_path, parallel)
    assert fingerprints(models) == json.loads((KEPT / "expected.json").read_text())
    assert state["objects"]["trainer"] == {"rollouts": 5, "critic_updates": 2}
    assert torch.equal(state["objects"]["replay"]["tokens"], torch.arange(3))
    manifest = Manifest.read(KEPT / "checkpoints" / name)
    assert (manifest.format_version, manifest.package_version, manifest.metrics["reward/mean"]) == (1, "0.1.0", 0.25)


def test_what_is_written_now_loads(config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    (tmp_path / "saved").mkdir()
    _, expected = save(tmp_path / "saved", parallel)
    for name in ("step_000006", "step_000007"):
        models, _ = loaded(tmp_path / "saved", name, config, tmp_path, parallel)
        assert fingerprints(models) == expected


def saver(config: Config, tmp_path: Path, parallel: ParallelContext, said: list[str]) -> tuple[Checkpointer, Models]:
    models = make_models(tmp_path, parallel, seed=1)
    update(models.policy, 1, seed=2)
    return Checkpointer(config, parallel, models, said.append), models


def test_models_that_wait_on_the_host_come_for_the_copy_and_go_again(config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    """With offloading: a save from the host equals one from the device, and loading leaves the models on the host."""
    plain, _ = saver(config, tmp_path, parallel, [])
    plain.begin("rl", 1)
    plain.commit(STATE, {})
    plain.wait()
    plain.close()
    models = make_models(tmp_path, parallel, seed=50, offload=True)
    found = choose(config.run.dir, "step_000001", print)
    assert found is not None
    load_models(config, models, found)
    assert models.residency.device_bytes() == 0
    again = Checkpointer(config, parallel, models, print)
    again.begin("rl", 2)
    models.residency.enter("generate")
    again.commit(STATE, {})
    again.wait()
    again.close()
    first, second = files.list_checkpoints(config.run.dir)
    compared = 0
    for part in ("policy/weights", "policy/optimizer", "critic/weights"):  # the critic's optimizer has nothing yet
        readers = [DistributedCheckpointReader(path / part) for path in (first, second)]
        assert readers[0].keys == readers[1].keys
        for key in readers[0].keys:
            shape = readers[0].shape(key)
            assert torch.equal(*(reader.read(key, (0,) * len(shape), shape) for reader in readers)), key
            compared += 1
    assert compared > 20


def test_a_save_goes_on_while_the_models_change_and_old_ones_go(config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    said: list[str] = []
    checkpointer, models = saver(config, tmp_path, parallel, said)
    expected = []
    for step in (1, 2, 3):
        expected.append(fingerprints(models))
        checkpointer.begin("rl", step)
        checkpointer.commit(STATE, {"reward/mean": float("nan"), "critic/loss": 1.5})
        assert checkpointer.under_way == ("rl", step)
        update(models.policy, 1, seed=step)
    checkpointer.wait()
    checkpointer.close()
    assert checkpointer.published == ("rl", 3)
    assert [path.name for path in files.list_checkpoints(config.run.dir)] == ["step_000002", "step_000003"]
    assert said == [f"checkpoint saved: {config.run.dir}/checkpoints/step_00000{step}" for step in (1, 2, 3)]
    found, _ = loaded(Path(config.run.dir), "step_000002", config, tmp_path, parallel)
    assert fingerprints(found) == expected[1]
    assert Manifest.read(Path(config.run.dir) / "checkpoints/step_000002").metrics == {"critic/loss": 1.5}


@pytest.mark.parametrize("reshardable_every", [0, 1])
@pytest.mark.parametrize("ordinary", [3, 0])
def test_updates_beside_the_schedule_come_back(
    tmp_path: Path, config: Config, parallel: ParallelContext, ordinary: int, reshardable_every: int
) -> None:
    """Self-imitation's updates: in weights and moments and in AdamW's own counter, not in the schedule's."""
    settings = load(tmp_path, "critic.value_pretraining.steps=0", f"checkpoint.reshardable_every={reshardable_every}")
    models = make_models(tmp_path, parallel, seed=1)
    assert models.critic is not None
    for model in (models.policy, models.critic):
        update(model, ordinary, seed=2)
        update(model, 2, seed=3, unscheduled_lr=0.02)
    expected = fingerprints(models)
    checkpointer = Checkpointer(settings, parallel, models, print)
    checkpointer.begin("rl", 1)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    checkpointer.close()
    found, _ = loaded(Path(config.run.dir), "step_000001", settings, tmp_path, parallel)
    assert found.critic is not None
    assert fingerprints(found) == expected
    for model in (found.policy, found.critic):
        assert model.optimizer is not None
        counts = model.optimizer.updates, model.optimizer.unscheduled_updates
        assert counts == (ordinary, 2)
        steps = {float(value) for name, value in contents(model).items() if name.startswith("step.")}
        assert steps == {ordinary + 2.0}
    for unscheduled_lr in (None, 0.02):  # the next update of the schedule, and the next beside it
        for model in (models.policy, models.critic, found.policy, found.critic):
            update(model, 1, seed=4, unscheduled_lr=unscheduled_lr)
        assert fingerprints(found) == fingerprints(models) != expected
        assert found.policy.optimizer is not None and models.policy.optimizer is not None
        assert found.policy.optimizer.learning_rate == models.policy.optimizer.learning_rate


def full_after(num_bytes: int) -> Callable[..., None]:
    original = strategies.HashingFile._append

    def write(self: Any, data: Any) -> None:
        if self.size > num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    return write


def test_a_full_disk_costs_the_save_and_nothing_else(config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    said: list[str] = []
    checkpointer, _ = saver(config, tmp_path, parallel, said)
    checkpointer.begin("rl", 1)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    with mock.patch.object(strategies.HashingFile, "_append", full_after(2000)):
        for step in (2, 3):
            checkpointer.begin("rl", step)
            checkpointer.commit(STATE, {})
            checkpointer.wait()
    with mock.patch.object(files.shutil, "disk_usage", return_value=mock.Mock(free=1000)):
        checkpointer.begin("rl", 4)
        checkpointer.commit(STATE, {})
    assert [path.name for path in (Path(config.run.dir) / "checkpoints").iterdir()] == ["step_000001"]
    assert "step_000002 failed: cannot write" in said[1] and "No space left on device; retrying after the next step" in said[1]
    assert said[2].endswith("retrying after the next 2 steps")
    assert "step_000004 failed: no space for a checkpoint" in said[3] and said[3].endswith("retrying after the next 4 steps")
    assert [checkpointer.is_due(step) for step in (5, 6, 7, 8)] == [False, False, False, True]
    checkpointer.begin("rl", 8)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    checkpointer.close()
    assert checkpointer.published == ("rl", 8)


def full_for(name: str) -> Callable[..., Any]:
    """An ``open`` that gives /dev/full for new files of this name."""
    original = io.open

    def opened(file: Any, mode: str = "r", *positional: Any, **named: Any) -> Any:
        if isinstance(file, str | Path) and Path(file).name == name and "r" not in mode:
            return original("/dev/full", mode.replace("x", "w"), *positional, **named)
        return original(file, mode, *positional, **named)

    return opened


def test_a_disk_that_is_full_at_any_file_costs_the_save_and_nothing_else(config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    said: list[str] = []
    checkpointer, models = saver(config, tmp_path, parallel, said)
    before = fingerprints(models)
    names = (
        COMMON_NAME,
        METADATA_NAME,
        "metadata.json",
        "rank_00000.safetensors",
        "state.json",
        "config.yaml",
        "config.json",
        "manifest.json",
    )
    for number, name in enumerate(names, 1):
        opened = full_for(name)
        with mock.patch.object(io, "open", opened), mock.patch.object(builtins, "open", opened):
            checkpointer.begin("rl", 1)
            checkpointer.commit(STATE, {})
            checkpointer.wait()
        assert (checkpointer.failures, len(said)) == (number, number), (name, said)
        assert "step_000001 failed: cannot write" in said[-1] and "No space left on device; retrying" in said[-1], (name, said)
        assert list((Path(config.run.dir) / "checkpoints").iterdir()) == [], name
    checkpointer.begin("rl", 2)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    checkpointer.close()
    assert (checkpointer.published, checkpointer.failures) == (("rl", 2), 0)
    found, _ = loaded(Path(config.run.dir), "step_000002", config, tmp_path, parallel)
    assert fingerprints(found) == fingerprints(models) == before


def test_saves_are_due_by_steps_and_by_the_clock(
    config: Config, tmp_path: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(saver_module.time, "monotonic", lambda: now[0])
    both = load(tmp_path, "critic.value_pretraining.steps=0", "checkpoint={every_steps: 4, every_minutes: 2}")
    checkpointer, _ = saver(both, tmp_path, parallel, [])
    assert [checkpointer.is_due(step) for step in (1, 2, 3, 4, 5)] == [False, False, False, True, False]
    now[0] += 119.0
    assert not checkpointer.is_due(5)
    now[0] += 1.0
    assert checkpointer.is_due(5)
    checkpointer.begin("rl", 5)  # from here the two minutes count again
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    assert [checkpointer.is_due(step) for step in (6, 8)] == [False, True]
    now[0] += 120.0
    assert checkpointer.is_due(6)
    checkpointer.close()


def test_no_memory_for_the_copy_costs_the_save_and_nothing_else(
    config: Config, tmp_path: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    checkpointer, models = saver(config, tmp_path, parallel, said)
    before = fingerprints(models)
    original, full = torch.empty, [True]

    def no_memory(*sizes: Any, **more: Any) -> torch.Tensor:
        if more == {"dtype": torch.uint8} and full[0]:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:131] . DefaultCPUAllocator: can't allocate memory")
        return original(*sizes, **more)

    monkeypatch.setattr(torch, "empty", no_memory)
    checkpointer.begin("rl", 1)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    assert "step_000001 failed: no host memory for the 0.00 GiB copy of policy/weights on rank 0: cannot allocate" in said[0]
    assert said[0].endswith("retrying after the next step")
    assert list((Path(config.run.dir) / "checkpoints").iterdir()) == []
    full[0] = False
    assert checkpointer.is_due(2)
    checkpointer.begin("rl", 2)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    checkpointer.close()
    assert checkpointer.published == ("rl", 2)
    found, _ = loaded(Path(config.run.dir), "step_000002", config, tmp_path, parallel)
    assert fingerprints(found) == fingerprints(models) == before


def test_the_copies_take_what_the_plan_says_and_both_forms_share_them(
    config: Config, tmp_path: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, models = saver(config, tmp_path, parallel, [])
    assert models.critic is not None
    update(models.critic, 1, seed=3)
    planned = {role: snapshot_bytes(models.architecture, role, dtype, config.parallel, stage=0, overlap=False)[0] for role, dtype in DTYPES}
    held = []
    for step, reshardable in ((1, False), (2, True), (3, False)):
        checkpointer.begin("rl", step, final=reshardable)
        checkpointer.commit(STATE, {})
        checkpointer.wait()
        held.append(checkpointer._saver.pool.num_bytes)
    checkpointer.close()
    manifests = [Manifest.read(path) for path in files.list_checkpoints(config.run.dir)]
    assert [manifest.optimizer_format for manifest in manifests] == ["fully_reshardable", "dp_reshardable"]
    assert held[0] == held[2] and max(held) <= 1.02 * held[0]
    assert held[0] == pytest.approx(sum(planned.values()), rel=0.1)  # tensors of a few bytes begin at multiples of 64


def test_saves_are_counted_over_resumes_and_without_failed_ones(
    tmp_path: Path, config: Config, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run that is resumed often would never write a checkpoint that loads at another layout."""
    settings = load(tmp_path, "critic.value_pretraining.steps=0", "checkpoint={keep_last: 4, reshardable_every: 2}")
    models = make_models(tmp_path, parallel, seed=1)
    update(models.policy, 1, seed=2)
    manifest, forms = None, []
    for step in (1, 2, 3):
        checkpointer = Checkpointer(settings, parallel, models, print, resumed=manifest)
        if step == 2:
            with monkeypatch.context() as patch:
                patch.setattr(files, "require_space", mock.Mock(side_effect=CheckpointError("no space")))
                checkpointer.begin("rl", step)
            assert checkpointer.failures == 1
        checkpointer.begin("rl", step)
        checkpointer.commit(STATE, {})
        checkpointer.wait()
        checkpointer.close()
        manifest = Manifest.read(files.list_checkpoints(settings.run.dir)[-1])
        forms.append((manifest.number, manifest.optimizer_format))
    assert forms == [(1, "dp_reshardable"), (2, "fully_reshardable"), (3, "dp_reshardable")]
    checkpointer = Checkpointer(settings, parallel, models, print, resumed=replace(manifest, number=0))  # of an earlier version
    checkpointer.begin("rl", 4)
    checkpointer.commit(STATE, {})
    checkpointer.wait()
    checkpointer.close()
    assert Manifest.read(files.list_checkpoints(settings.run.dir)[-1]).number == 1


def test_the_newest_that_loads_at_another_layout_stays(tmp_path: Path, config: Config, parallel: ParallelContext) -> None:
    """The refusal of a resume at another layout names it."""
    settings = load(tmp_path, "critic.value_pretraining.steps=0", "checkpoint={keep_last: 2, reshardable_every: 3}")
    checkpointer, models = saver(settings, tmp_path, parallel, [])
    kept = []
    for step in range(1, 9):
        checkpointer.begin("rl", step)
        checkpointer.commit(STATE, {})
        checkpointer.wait()
        checkpointer._writer.submit(int).result()  # deletion of old ones is done
        kept.append([int(path.name[-1]) for path in files.list_checkpoints(settings.run.dir)])
    checkpointer.close()
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [5, 6], [6, 7], [6, 7, 8]]
    newest = choose(settings.run.dir, None, print)
    assert newest is not None
    other: Any = SimpleNamespace(**dict.fromkeys(newest.manifest.layout, 2))
    with pytest.raises(CheckpointError, match="resume from step_000006 with --resume-from step_000006"):
        _require_loadable(newest, {"policy": other}, models.policy.layers)
    found, _ = loaded(Path(settings.run.dir), "step_000006", settings, tmp_path, parallel)
    assert fingerprints(found) == fingerprints(models)


def test_the_newest_complete_one_is_taken(config: Config, tmp_path: Path, parallel: ParallelContext) -> None:
    checkpointer, _ = saver(config, tmp_path, parallel, [])
    for step in (1, 2):
        checkpointer.begin("rl", step)
        checkpointer.commit(STATE, {})
    checkpointer.wait()
    checkpointer.close()
    said: list[str] = []
    chosen = choose(config.run.dir, None, said.append)
    assert chosen is not None and chosen.path.name == "step_000002" and said == []
    victim = next((chosen.path / "policy/optimizer").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    chosen = choose(config.run.dir, None, said.append)
    assert chosen is not None and chosen.path.name == "step_000001"
    assert "step_000002 is damaged and is not used: policy/optimizer/__0_0.distcp has" in said[0]
    with pytest.raises(CheckpointError, match="step_000002 is damaged"):
        choose(config.run.dir, "step_000002", said.append)
    with pytest.raises(CheckpointError, match="has no checkpoint 'step_9'; there are: step_000001, step_000002"):
        choose(config.run.dir, "step_9", said.append)
    (chosen.path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints of .* are damaged \(step_000001, step_000002\)"):
        choose(config.run.dir, None, said.append)
    assert choose(str(tmp_path / "nothing"), None, said.append) is None


def test_an_old_checkpoint_that_cannot_be_deleted_is_told(
    config: Config, tmp_path: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    settings = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep_last": 1, "keep_best": 0})})
    checkpointer, _ = saver(settings, tmp_path, parallel, said)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "delete", refused)
    for step in (1, 2):
        checkpointer.begin("rl", step)
        checkpointer.commit(STATE, {})
        checkpointer.wait()
    checkpointer.close()
    assert checkpointer.published == ("rl", 2)
    assert [line for line in said if line.startswith("warning: an old checkpoint could not be deleted")], said
