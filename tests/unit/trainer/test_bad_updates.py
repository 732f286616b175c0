"""Which losses are spikes, when a run stops over skipped updates, and the batch that it keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vapo_mcore.config.schema import FaultsConfig, LossSpikeConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience.bad_batch import BadUpdate, load_bad_batch, save_bad_batch
from vapo_mcore.megatron.optimizer import Skipped
from vapo_mcore.trainer.bad_updates import UpdateGuard


def guard(losses: list[float], *, factor: float = 10.0) -> UpdateGuard:
    found = UpdateGuard(FaultsConfig(loss_spike=LossSpikeConfig(factor=factor, window=8)))
    for loss in losses:
        found.note(loss, None)
    return found


LOSSES = [0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.4, -0.4]  # median 0, median absolute deviation 0.25


def test_a_spike_is_measured_in_deviations_above_the_median() -> None:
    assert not guard(LOSSES).is_spike(2.49)
    assert guard(LOSSES).is_spike(2.51)
    assert not guard(LOSSES).is_spike(-100.0)  # a low loss is no fault
    assert not guard([loss + 50 for loss in LOSSES]).is_spike(52.49)
    assert guard([loss + 50 for loss in LOSSES]).is_spike(52.51)


def test_nothing_is_a_spike_before_the_window_is_full_or_without_spread_or_when_off() -> None:
    assert not guard(LOSSES[:-1]).is_spike(1e9)
    assert not guard([1.0] * 8).is_spike(1e9)
    assert not UpdateGuard(FaultsConfig()).is_spike(1e9)


def test_skipped_losses_do_not_move_the_median() -> None:
    found = guard(LOSSES)
    for _ in range(8):
        found.note(1000.0, Skipped.SPIKE)
    assert found.is_spike(2.51)


def test_updates_are_counted_in_a_row() -> None:
    found = UpdateGuard(FaultsConfig(bad_updates_in_a_row=3))
    for skipped, stop in ((Skipped.LOSS, False), (Skipped.GRADIENT, False), (None, False), (Skipped.LOSS, False), (Skipped.SPIKE, False)):
        found.note(math.nan, skipped)
        assert found.must_stop is stop
    found.note(math.nan, Skipped.LOSS)
    assert found.must_stop


def test_a_guard_continues_from_its_state() -> None:
    found = guard(LOSSES)
    found.note(math.nan, Skipped.LOSS)
    other = guard([])
    other.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert other.in_a_row == 1
    assert other.is_spike(2.51)
    assert not other.is_spike(2.49)


PARALLEL: Any = SimpleNamespace(
    rank=0,
    tensor_model_parallel_rank=0,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_rank=0,
    context_parallel_rank=0,
    context_parallel_size=1,
    data_parallel_rank=0,
    data_parallel_size=1,
    device=torch.device("cpu"),
)
UPDATE = BadUpdate("rl", 12, "policy", 0, 3, str(Skipped.GRADIENT), 0.5, math.inf)


def rows(count: int) -> Rows:
    number = torch.arange(count)
    return Rows(
        prompt_id=[f"p{i}" for i in range(count)],
        group=number,
        sample_index=number,
        verdict=number > 0,
        graded=number >= 0,
        ungraded=[""] * count,
        score=number.float(),
        reward=torch.full((count,), math.nan),
        finish_reason=["stop"] * count,
        prompt_length=number + 1,
        response_length=number + 1,
        tool_length=torch.zeros_like(number),
        turns=torch.ones_like(number),
        observations_cut=torch.zeros_like(number),
        missed_end=number < 0,
        step_rewards=[()] * count,
        segments=[()] * count,
        observations=[()] * count,
        source=["s"] * count,
    )


def batches() -> list[MicroBatch]:
    packed = [MicroBatch(ThdLayout([4, 2]), torch.tensor([1, 0]), {"tokens": torch.arange(6), "advantages": torch.randn(6)})]
    empty = {"tokens": torch.empty(0, dtype=torch.int64), "advantages": torch.empty(0)}
    return [*packed, MicroBatch(ThdLayout([]), torch.empty(0, dtype=torch.int64), empty)]


def test_a_bad_batch_comes_back_as_the_loss_read_it(tmp_path: Path) -> None:
    given = batches()
    folder = save_bad_batch(tmp_path, UPDATE, rows(3), torch.tensor([2, 0]), given, PARALLEL)
    assert folder == tmp_path / "bad_batch_rl_step_0012_policy"
    assert sorted(path.name for path in folder.iterdir()) == ["batch.json", "data_rank_0000.safetensors"]
    info, found = load_bad_batch(folder, 0, PARALLEL)
    assert (info["reason"], info["grad_norm"], info["loss"], info["minibatch"]) == ("a gradient is not finite", "inf", 0.5, 3)
    assert info["rows"][2] | {"reward": None} == {
        "prompt_id": "p2",
        "group": 2,
        "sample_index": 2,
        "verdict": True,
        "graded": True,
        "ungraded": "",
        "score": 2.0,
        "reward": None,
        "finish_reason": "stop",
        "prompt_length": 3,
        "response_length": 3,
        "tool_length": 0,
        "turns": 1,
        "observations_cut": 0,
        "missed_end": False,
        "step_rewards": [],
        "segments": [],
        "observations": [],
        "source": "s",
    }
    assert [batch.rows.tolist() for batch in found] == [[0, 2], []]  # numbers of the whole rollout
    for one, other in zip(given, found, strict=True):
        assert one.layout.lengths.tolist() == other.layout.lengths.tolist()
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert found[1].is_dummy


def test_one_rank_of_each_data_parallel_index_writes(tmp_path: Path) -> None:
    other = SimpleNamespace(**{**vars(PARALLEL), "rank": 1, "tensor_model_parallel_rank": 1})
    save_bad_batch(tmp_path, UPDATE, rows(3), torch.tensor([2, 0]), batches(), other)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "format"])
def test_a_folder_that_is_no_bad_batch_is_told(tmp_path: Path, damage: str) -> None:
    folder = save_bad_batch(tmp_path, UPDATE, rows(3), torch.tensor([2, 0]), batches(), PARALLEL)
    path = folder / "data_rank_0000.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:40])
    else:
        info = json.loads((folder / "batch.json").read_text())
        (folder / "batch.json").write_text(json.dumps(info | {"format": 7}))
    with pytest.raises(CheckpointError, match="format 7" if damage == "format" else "cannot read the bad batch"):
        load_bad_batch(folder, 0, PARALLEL)
