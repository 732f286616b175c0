"""The rollout of a step on disk, and which checkpoint a replay starts from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.trainer.rollouts import make_batch, make_config, make_rows
from vapo_mcore.checkpoint_files import Manifest, Stage, checkpoints_folder
from vapo_mcore.commands.replay_checks import ReplayOptions, check_replay, checkpoint_before, is_exact
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience import step_dump
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.open_responses import HorizonCounts
from vapo_mcore.experience.sampling import Round, no_rows
from vapo_mcore.experience.step_dump import StepDump, load_step, save_step

ROWS = make_rows(
    [3, 1, 2, 0],
    [0.1, 1.0, 0.0, 0.7],
    groups=[0, 0, 1, 1],
    graded=[True, True, False, True],
    cut=(2,),
    steps={0: [(1, 0.3)]},
    segments=[((2, 1), (1, 0)), ((1, 0),), ((1, 3), (1, 2)), ()],
)
VOCAB = 400  # token ids of make_batch are 100 x row + position
COUNTS = SamplingCounts(
    rounds=2, prompts_tried=5, dropped_all_right=1, horizon=HorizonCounts(9, 4, 5, 1, 30, 12, ((0, 4, 0.1), (2, 8, -0.3)))
)


def write(run: Path, *, ranks: int = 2) -> None:
    """Two ranks hold two rows each, given in an order of their own; a third one would hold none."""
    held = ([2, 0], [1, 3])
    holder = torch.tensor([0, 1, 0, 1])
    for rank in reversed(range(ranks)):  # each makes its own part; the first one makes the folder, so it is kept here
        local = make_batch(ROWS.select(held[rank]), held[rank]) if rank < 2 else no_rows()
        if rank:
            step_dump.dump_folder(run, "rl", 12).mkdir(parents=True, exist_ok=True)
            step_dump._write_tokens(step_dump.dump_folder(run, "rl", 12), local, rank)
            continue
        later = step_dump.dump_folder(run, "rl", 12).rename(run / "later") if ranks > 1 else None
        assert save_step(run, StepDump("rl", 12, 15, Round(ROWS, holder, local, {}), COUNTS), rank) is None
        if later is not None:
            for path in later.iterdir():
                path.rename(step_dump.dump_folder(run, "rl", 12) / path.name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_dump_comes_back_on_as_many_ranks_as_there_are(tmp_path: Path, world_size: int) -> None:
    write(tmp_path, ranks=3)
    whole = make_batch(ROWS)
    seen: list[int] = []
    for rank in range(world_size):
        dump = load_step(tmp_path, "rl", 12, rank=rank, world_size=world_size, known=torch.ones(VOCAB, dtype=torch.bool))
        assert (dump.stage, dump.step, dump.rollouts, dump.counts) == ("rl", 12, 15, COUNTS)
        for name, column in vars(ROWS).items():
            found = getattr(dump.sampled.rows, name)
            assert torch.equal(found, column) if isinstance(column, torch.Tensor) else found == column, name
        local = dump.sampled.local
        assert (dump.sampled.holder == rank).nonzero().flatten().tolist() == sorted(local.row_ids.tolist())
        expected = whole.select(local.row_ids)
        assert torch.equal(local.cu_seqlens, expected.cu_seqlens)
        assert set(local.tensors) == {"tokens", "response_mask", "rollout_logprobs"}
        assert all(torch.equal(local[name], expected[name]) for name in local.tensors)
        seen += local.row_ids.tolist()
    assert sorted(seen) == [0, 1, 2, 3]


def damage_info(folder: Path) -> None:
    (folder / "step.json").write_text("{")


def later_format(folder: Path) -> None:
    info = json.loads((folder / "step.json").read_text())
    (folder / "step.json").write_text(json.dumps(info | {"format": 2}))


def drop_a_row(folder: Path) -> None:
    info = json.loads((folder / "step.json").read_text())
    del info["rows"][0]["score"]
    (folder / "step.json").write_text(json.dumps(info))


def change_tensor(name: str, position: int, value: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "rank_0001.safetensors"
        tensors = load_file(path)
        tensors[name][position] = value
        save_file(tensors, path)

    return damage


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (damage_info, "cannot read the dump: JSONDecodeError"),
        (later_format, "written in format 2, but this version reads format 1"),
        (drop_a_row, "cannot read the dump: KeyError: 'score'"),
        (lambda folder: (folder / "rank_0001.safetensors").unlink(), "expected 4 responses for rank 0, found 2: a file is missing"),
        (lambda folder: (folder / "rank_0001.safetensors").write_bytes(b"x" * 20), "cannot read the dump: SafetensorError"),
        (
            change_tensor("tokens", 1, 400),
            "rank_0001.safetensors: token id 400 is not in the model's vocabulary of 400: the dump is damaged",
        ),
        (change_tensor("tokens", 1, -1), "token id -1 is not in the model's vocabulary"),
        (change_tensor("cu_seqlens", 1, 2), "cannot read the dump: ValueError: cu_seqlens does not agree with"),
        (change_tensor("response_mask", 0, 1), "2 tokens are marked as sampled, but the responses have 1"),
        (change_tensor("row_ids", 0, -3), r"holds rows -3 .. 3, but step.json has 4"),
        (
            lambda folder: (folder / "step.json").unlink(),
            "step_000012 is not the dump of a step; existing dumps: none. Steps are dumped according to",
        ),
    ],
)
def test_a_damaged_dump_is_told(tmp_path: Path, damage: Callable[[Path], object], expected: str) -> None:
    write(tmp_path)
    damage(step_dump.dump_folder(tmp_path, "rl", 12))
    with pytest.raises(CheckpointError, match=expected):
        load_step(tmp_path, "rl", 12, rank=0, world_size=1, known=torch.ones(VOCAB, dtype=torch.bool))


def test_ranks_that_hold_other_rows_than_is_said_are_told(tmp_path: Path) -> None:
    write(tmp_path)
    path = step_dump.dump_folder(tmp_path, "rl", 12) / "step.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"holder": [1, 0, 0, 1]}))
    with pytest.raises(CheckpointError, match=r"do not hold the rows listed in step.json: the dump is damaged"):
        load_step(tmp_path, "rl", 12, rank=0, world_size=2, known=torch.ones(VOCAB, dtype=torch.bool))


def test_a_dump_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "dumps").touch()
    dump = StepDump("rl", 1, 1, Round(ROWS, torch.zeros(4, dtype=torch.int64), make_batch(ROWS), {}), COUNTS)
    assert "Not a directory" in str(save_step(tmp_path, dump, 0))


def test_which_steps_are_dumped() -> None:
    run = make_config().run
    assert not any(run.dumps_step(step) for step in range(1, 20))
    every = run.model_copy(update={"dump_every_steps": 4, "dump_steps": (5, 6)})
    assert [step for step in range(1, 13) if every.dumps_step(step)] == [4, 5, 6, 8, 12]


def test_a_replay_starts_from_the_newest_checkpoint_before_its_step(tmp_path: Path) -> None:
    for name in ("value_pretraining_000002", "step_000004", "step_000007"):
        (checkpoints_folder(tmp_path) / name).mkdir(parents=True)

    def before(step: int, stage: Stage = "rl", name: str | None = None) -> str | None:
        return checkpoint_before(tmp_path, ReplayOptions(step, stage, name))

    assert [before(step) for step in (1, 4, 5, 7, 8)] == [
        "value_pretraining_000002",
        "value_pretraining_000002",
        "step_000004",
        "step_000004",
        "step_000007",
    ]
    assert (before(1, "value_pretraining"), before(9, "value_pretraining")) == (None, "value_pretraining_000002")
    assert before(9, name="step_000004") == "step_000004"
    with pytest.raises(CheckpointError, match="has no checkpoint 'step_000005'; there are: value_pretraining_000002, step_000004,"):
        before(9, name="step_000005")
    with pytest.raises(CheckpointError, match=r"step_000007 is not before step 7 \(rl\)"):
        before(7, name="step_000007")
    with pytest.raises(CheckpointError, match="is not the dump of a step"):
        check_replay(make_config(), ReplayOptions(3))


def test_whether_a_checkpoint_is_the_state_right_before_the_step() -> None:
    def exact(step: int, stage: Stage, saved: tuple[Stage, int] | None, pretrained: int) -> bool:
        manifest = None if saved is None else Manifest(*saved, "dp_reshardable", {}, {}, {}, "0")
        rows = [{"step": number, "stage": "value_pretraining"} for number in range(1, pretrained + 1)]
        return is_exact(ReplayOptions(step, stage), manifest, rows)

    assert exact(5, "rl", ("rl", 4), 3)
    assert not exact(5, "rl", ("rl", 3), 3)
    assert exact(1, "rl", ("value_pretraining", 3), 3)  # the last step of pretraining, which may have ended before its maximum
    assert not exact(1, "rl", ("value_pretraining", 2), 3)
    assert not exact(2, "rl", ("value_pretraining", 3), 3)
    assert exact(1, "rl", None, 0)
    assert not exact(1, "rl", None, 3)
    assert exact(1, "value_pretraining", None, 0)
    assert exact(3, "value_pretraining", ("value_pretraining", 2), 2)
    assert not exact(3, "value_pretraining", ("value_pretraining", 1), 2)
